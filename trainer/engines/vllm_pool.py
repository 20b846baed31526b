"""Several requests in flight to one or more vLLM servers, with a time to wait for a server that was lost.

One event loop in a thread of its own carries all requests, whichever thread asked. Each request is tried for
`patience_s` from its first failure: until then a broken connection and a failure inside the server are waited
for with growing pauses, and a started server that died is started again, though not for ever at one request.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from queue import SimpleQueue
from typing import TypeVar

import httpx
from rich.console import Console

from trainer.engines.vllm_client import ServerLost
from trainer.engines.vllm_server import RunningServer
from trainer.errors import UserError

Answer = TypeVar("Answer")
Job = Callable[[RunningServer, httpx.AsyncClient], Awaitable[Answer]]
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 15.0
MOST_DEATHS = 3  # of started servers that had the same request: it, or what came with it, is the cause


class Member:
    """One server of the pool, under the name that it has for people."""

    def __init__(self, make: Callable[[], RunningServer], check: Callable[[RunningServer], None]) -> None:
        self.make, self.check = make, check
        self.server = make()
        self.http: httpx.AsyncClient | None = None
        self.reviving = asyncio.Lock()
        self.told = False  # that it was lost, since its last answer
        self.lost: float | None = None  # since when, on the monotonic clock
        self.failure: tuple[float, UserError] = (0.0, UserError("it was not started again yet."))

    def start(self) -> None:
        """Starts or joins the server. Raises UserError."""
        with ExitStack() as stack:
            stack.enter_context(self.server)
            self.check(self.server)
            stack.pop_all()


class Pool:
    """`make` says how each server is made, `check` looks at one that is up and raises UserError if it will
    not do. `start` and `stop` are for one thread, `submit` for any."""

    def __init__(self, make: Sequence[Callable[[], RunningServer]], check: Callable[[RunningServer], None],
                 in_flight: int, patience_s: float) -> None:
        self.members = [Member(each, check) for each in make]
        self.in_flight, self.patience_s = in_flight, patience_s
        self.room = 2 * in_flight * len(self.members)  # requests worth having under way or unfetched
        self.loop = asyncio.new_event_loop()
        self.free: asyncio.Queue[Member] = asyncio.Queue()
        self.thread = threading.Thread(target=self.loop.run_forever, name="vllm-requests", daemon=True)
        self.starter = ThreadPoolExecutor(len(self.members), thread_name_prefix="vllm-start")
        self.closed = False

    def start(self) -> None:
        """Starts or joins all servers, one after the other. Raises UserError and leaves nothing running."""
        try:
            for member in self.members:
                member.start()
        except BaseException:
            self._stop_servers()
            self.loop.close()
            raise
        self.thread.start()
        asyncio.run_coroutine_threadsafe(self._open(), self.loop).result()

    def submit(self, job: Job[Answer]) -> Future[Answer]:
        """The answer of `job`, given to some server as soon as one has room, or its UserError."""
        return asyncio.run_coroutine_threadsafe(self._patiently(job), self.loop)

    def as_they_come(self, jobs: Iterable[tuple[str, Job[Answer]]]) -> Iterator[tuple[str, Answer]]:
        """The answers of jobs by their names, each as soon as it is there. A bounded number of jobs is under
        way or waits to be fetched; the next is taken when there is room, so no server is idle in between."""
        arrived: SimpleQueue[tuple[str, Future[Answer]]] = SimpleQueue()
        under_way: set[Future[Answer]] = set()
        todo = iter(jobs)
        try:
            while True:
                while len(under_way) < self.room and (following := next(todo, None)) is not None:
                    asked = self.submit(following[1])
                    under_way.add(asked)
                    asked.add_done_callback(partial(_put, arrived, following[0]))
                if not under_way:
                    return
                name, answered = arrived.get()
                under_way.discard(answered)
                yield name, answered.result()
        finally:
            for unfetched in under_way:
                unfetched.cancel()

    def stop(self) -> None:
        """Cancels what is under way and stops what was started, a restart that is under way included."""
        self.abandon()
        if self.thread.is_alive():
            asyncio.run_coroutine_threadsafe(self._close(), self.loop).result()
            self.loop.call_soon_threadsafe(self.loop.stop)
            self.thread.join()
            self.loop.close()
        self.starter.shutdown(wait=True)
        self._stop_servers()

    def abandon(self) -> None:
        """Ends a start that is under way, in whichever thread; `stop` still has to follow."""
        self.closed = True
        for member in self.members:
            member.server.abandoned = True

    def _stop_servers(self) -> None:
        with ExitStack() as stack:  # every one, whatever happens to another
            for member in self.members:
                stack.callback(member.server.stop)

    async def _open(self) -> None:
        for member in self.members:
            member.http = self._connection(member.server)
        for _ in range(self.in_flight):
            for member in self.members:
                self.free.put_nowait(member)

    def _connection(self, server: RunningServer) -> httpx.AsyncClient:
        limits = httpx.Limits(max_connections=self.in_flight, max_keepalive_connections=self.in_flight)
        return httpx.AsyncClient(**server.client.options, limits=limits)

    async def _close(self) -> None:
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for member in self.members:
            if member.http is not None:
                await member.http.aclose()

    async def _patiently(self, job: Job[Answer]) -> Answer:
        pause, began, died = FIRST_PAUSE, None, set()
        while True:
            member = await self.free.get()
            try:
                answer = await self._once(member, job)
                if member.told:
                    _say(f"the server at {member.server.url} answers again.")
                member.told, member.lost = False, None
                return answer
            except ServerLost as error:
                lost = error
                if member.server.death() is not None:
                    died.add(member.server)
            finally:
                self.free.put_nowait(member)
            now = time.monotonic()
            began, member.lost = began or now, member.lost or now
            left = self.patience_s - (now - began)
            if len(died) == MOST_DEATHS:
                raise UserError(f"{MOST_DEATHS} servers, one after the other, ended before they answered: "
                                f"{lost}") from lost
            if left <= 0:
                raise UserError("a server was lost and did not come back within "
                                f"target_engine.runtime.patience_s={self.patience_s:g} s: {lost}") from lost
            self._tell(member, lost, left)
            await asyncio.sleep(min(pause, left))
            pause = min(2 * pause, LONGEST_PAUSE)

    async def _once(self, member: Member, job: Job[Answer]) -> Answer:
        async with member.reviving:
            if member.server.death() is not None:
                member.lost = lost = member.lost or time.monotonic()
                failed, failure = member.failure
                if failed > lost and time.monotonic() - lost >= self.patience_s:
                    raise failure  # each request would start it once more, however many wait
                try:
                    await asyncio.wrap_future(self.starter.submit(self._restart, member))
                except UserError as error:
                    member.failure = time.monotonic(), error
                    raise
                assert member.http is not None
                await member.http.aclose()
                member.http = self._connection(member.server)
        assert member.http is not None
        return await job(member.server, member.http)

    def _restart(self, member: Member) -> None:
        member.server.stop()
        fresh = member.make()
        member.server, old = fresh, member.server
        if self.closed:
            raise ServerLost("the pool of servers is being closed.")
        try:
            member.start()
        except UserError:
            member.server = old  # known to be dead, so the next attempt starts it again
            raise

    def _tell(self, member: Member, lost: ServerLost, left: float) -> None:
        if not member.told:
            member.told = True
            _say(f"{lost} Trying again for up to {left:.0f} s (target_engine.runtime.patience_s).")


def _put(arrived: SimpleQueue[tuple[str, Future[Answer]]], name: str, answered: Future[Answer]) -> None:
    arrived.put((name, answered))


def _say(line: str) -> None:
    Console(stderr=True, soft_wrap=True, highlight=False, markup=False).print(line)
