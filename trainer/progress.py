"""Progress of a stage: rate, time left and the numbers that matter, as a bar on a terminal or log lines.

The rate is that of the last minute, so that a slow start (a server loading, a first compile) does not spoil
the estimate. What was done before a resumed stage started counts as done, not as speed. Everything goes to
standard output; errors alone go to standard error. Neither has to be there until the end, see `Output`.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, TextIO

from trainer.errors import UserError

WINDOW_SECONDS = 60.0


class Output:
    """Standard output or error that may go away or fill up: whoever reads it has seen enough, as `head` does,
    or its disk is full. What is printed from then on is lost. A run `goes_on` without it, as its result lies
    in files; for a command whose result is what it prints, a full disk is an error."""

    def __init__(self, stream: TextIO, goes_on: bool) -> None:
        self._stream, self._goes_on = stream, goes_on

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with self._lasting():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._lasting():
            self._stream.flush()

    @contextlib.contextmanager
    def _lasting(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)
            if self._goes_on:
                print(f"note: the output cannot be written any more ({error.strerror}); the run goes on "
                      f"without it", file=sys.stderr, flush=True)
            elif not isinstance(error, BrokenPipeError):
                raise UserError(f"the output cannot be written ({error.strerror}); give it another "
                                f"place") from error


@contextlib.contextmanager
def lasting_output(goes_on: bool) -> Iterator[None]:
    """Puts `Output` in the place of both streams; one that was closed from the start leads nowhere."""
    with contextlib.ExitStack() as stack:
        out, err = (stack.enter_context(open(os.devnull, "w")) if stream is None else stream
                    for stream in (sys.stdout, sys.stderr))
        stack.enter_context(contextlib.redirect_stderr(Output(err, goes_on=True)))
        stack.enter_context(contextlib.redirect_stdout(Output(out, goes_on)))
        try:
            yield
        finally:
            sys.stdout.flush()


def exit_status(tool: Callable[[], int], goes_on: bool) -> int:
    """What a tool for people ends with; 2 for a `UserError`, and for a file or folder that cannot be used,
    which are told in a line."""
    try:
        with lasting_output(goes_on):
            return tool()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
    except OSError as error:
        place = error.filename2 or error.filename or "a file"
        print(f"error: {place} cannot be read or written ({error.strerror or error}); mend that, or name "
              "another place", file=sys.stderr)
    return 2


class Progress:
    """`with Progress("responses", total=N, unit="tokens", start=done) as bar: bar.advance(n, loss=2.1)`.

    `advance` may be called from several threads. A total of 0 prints nothing. On a terminal the bar is drawn
    in place; elsewhere a line appears every `interval` seconds, and a last one at the end. With `warm_up` the
    first `advance` counts as done, not as speed: it took what no later one takes.
    """

    def __init__(self, name: str, total: int, unit: str = "steps", start: int = 0,
                 interval: float = 10.0, warm_up: bool = False) -> None:
        self.name, self.total, self.unit, self.interval = name, total, unit, interval
        self.warm_up = warm_up
        self.done = start
        self.numbers: dict[str, Any] = {}
        self._lock = threading.Lock()
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> Progress:
        self._started = self._printed = time.monotonic()
        self._count_from(self._started)
        if self.total and sys.stdout.isatty():
            self._open_bar()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None,
                 trace: TracebackType | None) -> None:
        if self._bar is not None:
            self._redraw()
            self._bar.stop()
        elif self.total:
            print(f"{self.name}: {self.line()}" + (" (stopped)" if kind else ""), flush=True)

    def advance(self, amount: int = 1, **numbers: Any) -> None:
        """Counts `amount` more of the unit as done and shows the given numbers until they are given again."""
        with self._lock:
            now = time.monotonic()
            self.done += amount
            self.numbers.update(numbers)
            if self.warm_up:
                self.warm_up = False
                self._count_from(now)
            self._remember(now)
            if not self.total:
                return
            if self._bar is not None:
                self._redraw()
            elif now - self._printed >= self.interval:
                self._printed = now
                print(f"{self.name}: {self.line()}", flush=True)

    def rate(self) -> float:
        """Units a second over the last minute; 0.0 while nothing was done."""
        (then, before), (now, after) = self._samples[0], self._samples[-1]
        return (after - before) / (now - then) if now > then else 0.0

    def line(self) -> str:
        share = f"{100 * self.done / self.total:.0f}%" if self.total else ""
        elapsed = f"elapsed {clock(time.monotonic() - self._started)}"
        return "  ".join(part for part in (f"{self.done:,}/{self.total:,} {self.unit}", share, elapsed,
                                           self._speed()) if part)

    def _speed(self) -> str:
        rate = self._overall() if self.done >= self.total else self.rate()
        parts = [f"{compact(rate)} {self.unit}/s"] if rate > 0 else []
        if rate > 0 and self.done < self.total:
            parts.append(f"eta {clock((self.total - self.done) / rate)}")
        return "  ".join(parts + [f"{name} {compact(value)}" for name, value in self.numbers.items()])

    def _overall(self) -> float:
        then, before = self._first
        seconds = self._samples[-1][0] - then
        return (self.done - before) / seconds if seconds > 0 else 0.0

    def _count_from(self, now: float) -> None:
        """What is done by now is no speed."""
        self._first = now, self.done
        self._samples: deque[tuple[float, int]] = deque([self._first])

    def _remember(self, now: float) -> None:
        """Keeps about one sample a second of the last minute, the newest always."""
        samples = self._samples
        if len(samples) > 1 and now - samples[-2][0] < 1.0:
            samples.pop()
        samples.append((now, self.done))
        while len(samples) > 2 and now - samples[1][0] > WINDOW_SECONDS:
            samples.popleft()

    def _open_bar(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as RichProgress

        self._bar = RichProgress(
            TextColumn("{task.description}"), BarColumn(bar_width=24),
            TextColumn("{task.completed:,.0f}/{task.total:,.0f} {task.fields[unit]}"),
            TextColumn("{task.percentage:.0f}%"), TimeElapsedColumn(),
            TextColumn("{task.fields[speed]}", markup=False),
            console=Console(file=sys.stdout), refresh_per_second=4)
        self._task = self._bar.add_task(self.name, total=self.total, completed=self.done, unit=self.unit,
                                        speed="")
        self._bar.start()

    def _redraw(self) -> None:
        self._bar.update(self._task, completed=self.done, speed=self._speed())


def compact(value: Any) -> str:
    """A number in few characters: 12,345 · 1.2M · 3.14 · 0.0031 · 3.1e-05; anything else as text."""
    if isinstance(value, bool) or not hasattr(value, "__float__"):
        return str(value)
    number = float(value)
    if number != number or number in (float("inf"), float("-inf")):
        return str(number)
    size = abs(number)
    if size >= 1e6:
        step, letter = (1e9, "B") if size >= 9.995e8 else (1e6, "M")
        return f"{number / step:.3g}{letter}" if size < 9.995e11 else f"{number:.2e}"
    if isinstance(value, int) or size >= 999.5:
        return f"{number:,.0f}"
    if size >= 0.001 or size == 0:
        return f"{number:.3g}"
    return f"{number:.1e}"


def clock(seconds: float) -> str:
    """Seconds as 0:07, 12:34, 3:04:05 or 2d 03:04:05."""
    whole = int(seconds + 0.5)
    days, rest = divmod(whole, 86400)
    hours, rest = divmod(rest, 3600)
    minutes, left = divmod(rest, 60)
    if days:
        return f"{days}d {hours:02d}:{minutes:02d}:{left:02d}"
    return f"{hours}:{minutes:02d}:{left:02d}" if hours else f"{minutes}:{left:02d}"
