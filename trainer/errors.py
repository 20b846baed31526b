"""The one kind of error that speaks to the user.

A `UserError` says what was found, what was expected and what to do, in terms of the settings; `__main__`
prints it as one line without a traceback. Everything else that is raised is a fault of ours. """


from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

# What reading on raises where a file, which people may have written, holds something else than it should.
UNREADABLE = (KeyError, TypeError, ValueError, AttributeError, ArithmeticError, MemoryError)


class UserError(ValueError):
    """Something the user can mend: a setting, a file, a full disk, a server that went away."""


class Several(UserError):
    """Faults that have nothing to do with each other, each told in a line of its own."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


class GateFailed(UserError):
    """A parity gate did not hold; the message names the likely cause."""


def first_line(error: BaseException) -> str:
    """What an error of a library says, in a line; the name of its kind where it says nothing."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


@contextmanager
def gathered() -> Iterator[Callable[[Callable[[], Any]], Any]]:
    """Yields a function that calls another one and returns None where that raises a UserError. What they said
    is raised at the end, together."""
    problems: list[str] = []

    def attempt(call: Callable[[], Any]) -> Any:
        try:
            return call()
        except UserError as error:
            problems.extend(error.problems if isinstance(error, Several) else [str(error)])
            return None

    yield attempt
    if problems:
        raise Several(list(dict.fromkeys(problems)))
