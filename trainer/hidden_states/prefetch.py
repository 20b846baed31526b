"""Threads that keep the next rows ready. What row n holds does not depend on them: they only ask earlier."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

Made = TypeVar("Made")


class Prefetch(Generic[Made]):
    """Calls `make(n)`, a pure function, for up to `ahead` numbers beyond the one that is asked for.

    Numbers from `end` on are never made on speculation. With `ahead` 0 nothing runs beside the caller. What
    `make` raises reaches whoever asks for that number. At most `ahead` + 1 results are held.
    """

    def __init__(self, make: Callable[[int], Made], ahead: int, end: int) -> None:
        self.make, self.ahead, self.end = make, ahead, end
        self._pool = ThreadPoolExecutor(ahead, thread_name_prefix="prefetch") if ahead else None
        self._ready: dict[int, Future[Made]] = {}

    def get(self, number: int) -> Made:
        if self._pool is None:
            return self.make(number)
        window = range(number, max(number + 1, min(number + self.ahead + 1, self.end)))
        for other in [each for each in self._ready if each not in window]:
            self._ready.pop(other).cancel()
        for each in window:
            if each not in self._ready:
                self._ready[each] = self._pool.submit(self.make, each)
        return self._ready.pop(number).result()

    def close(self) -> None:
        """Forgets what was not asked for, and waits for what is being made."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
        self._ready.clear()
