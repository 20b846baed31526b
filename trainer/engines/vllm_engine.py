"""The target behind real vLLM servers: answers from a plain one, hidden states from one with our connector.

A server is started when first asked for, in vLLM's own environment, and stopped with the engine; or servers
that run already are joined by their addresses. Started here, only one kind runs at a time: each wants the
memory. Hidden states come through files: in a private folder in memory, or on disk where that is too small,
for a server started here; in `runtime.shared_folder` for joined ones.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx

from trainer.engines.base import Group, Session, TargetEngine
from trainer.engines.states_folder import private_folder, shared_folder
from trainer.engines.vllm_pool import Pool
from trainer.engines.vllm_request import request
from trainer.engines.vllm_scores import likelihoods
from trainer.engines.vllm_server import RunningServer, VllmServer
from trainer.engines.vllm_states import Shape, StatesReader, place_connector, start_command, with_connector
from trainer.errors import UserError
from trainer.ranges import Count, Dtype, Positive, SequenceLength, Url
from trainer.records import Completion, HiddenStates, Sampling

VOLATILE = ("_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache")  # say nothing of it


@dataclass(frozen=True)
class VllmEngineRuntime:
    """Where the servers are and how hard they are worked, nothing that changes a result.

    `answer_urls` and `state_urls` are addresses of servers to join, none to start one; joined servers write
    hidden states to `shared_folder`. `in_flight` requests are under way at each server. A lost server may
    take `patience_s` seconds to come back, a file `file_wait_s` after its answer. `logs` takes the logs of
    started servers."""

    answer_urls: list[Url]
    state_urls: list[Url]
    shared_folder: str | None
    in_flight: Count
    patience_s: Positive
    file_wait_s: Positive
    logs: str


class VllmEngine(TargetEngine):
    """`server` says how one is started, but for its longest sequence: `max_length` tokens. `batch` prompts
    make a group. Hidden states of up to `states_batch` rows are computed together: of 1, they are the same
    bits whatever else is asked, before or beside; of more, sums are rounded in other orders."""

    apart = True

    def __init__(self, server: VllmServer, dtype: Dtype, batch: Count, states_batch: Count,
                 max_length: SequenceLength, trust_remote_code: bool, runtime: VllmEngineRuntime) -> None:
        if server.url is not None:
            raise UserError(f"target_engine.server.url={server.url} is not used, since answers and hidden "
                            "states come from different servers: set target_engine.runtime.answer_urls or "
                            "target_engine.runtime.state_urls instead.")
        more = ["--trust-remote-code"] if trust_remote_code else []
        self.settings = replace(server, dtype=dtype, arguments=[*server.arguments, *more])
        self.dtype, self.batch, self.states_batch = dtype, batch, states_batch
        self._max_length, self.runtime = max_length, runtime
        self.folder: Path | None = None
        self.end_ids: tuple[int, ...] = ()
        self._lock = threading.RLock()
        self._answers: Pool | None = None
        self._states: tuple[Pool, StatesReader] | None = None
        self._open = False
        self._starting: Pool | None = None
        self._private = ExitStack()
        self._started = 0

    @property
    def origin(self) -> str:
        """Name and version of what computes hidden states. Raises UserError when it is not to be found."""
        url = next(iter(self.runtime.state_urls), None)
        more = f", states_batch {self.states_batch}" if self.states_batch > 1 else ""
        return f"vllm {replace(self.settings, url=url).preflight()}{more}"

    @property
    def group(self) -> int:
        return self.batch

    @property
    def in_flight(self) -> int:
        return self.runtime.in_flight * max(1, len(self.runtime.state_urls))

    @property
    def max_length(self) -> int:
        return self._max_length

    def load(self, folder: Path, end_ids: Sequence[int]) -> Self:
        self.folder, self.end_ids = folder, tuple(end_ids)
        return self

    def __enter__(self) -> Self:
        assert self.folder is not None, "load() comes before the with statement"
        self._open = True
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self._open = False
        if (starting := self._starting) is not None:  # by another thread, which has the lock
            starting.abandon()
        with self._lock:
            self._stop_answers()
            self._stop_states()

    def completions(self, groups: Iterable[Group], sampling: Sampling) -> Iterator[tuple[str, Completion]]:
        """Raises UserError for a prompt without room, a refusal, or a server that was lost for good."""
        asked = enumerate(each for group in groups for each in group.items())
        return self._answering().as_they_come(
            (key, partial(self._answer, index, self._with_room(prompt), key, sampling))
            for index, (key, prompt) in asked)

    def _with_room(self, prompt: Sequence[int]) -> Sequence[int]:
        if len(prompt) >= self.max_length:
            raise UserError(f"a prompt has {len(prompt)} tokens but target_engine.max_length is "
                            f"{self.max_length}; raise it or leave the prompt out.")
        return prompt

    async def _answer(self, index: int, prompt: Sequence[int], key: str, sampling: Sampling,
                      server: RunningServer, http: httpx.AsyncClient) -> Completion:
        room = replace(sampling, max_new_tokens=min(sampling.max_new_tokens, self.max_length - len(prompt)))
        body = request(server.served_name, prompt, room, key, self.end_ids)
        return await server.client.complete_one(http, index, body)

    def likelihoods(self, rows: Iterable[Sequence[int]]) -> Iterator[list[float]]:
        """Of the servers that answer. Raises UserError, as `completions`."""
        return likelihoods(self._answering(), map(self._with_room, rows))

    def hidden_states(self, rows: Sequence[Sequence[int]],
                      tap_layers: Sequence[int]) -> Iterator[HiddenStates]:
        """In order; a bounded number of rows is under way or waits to be fetched. May be called from several
        threads at once. Raises UserError for a row that is too long, an answer that does not hold what was
        asked, or a server that was lost for good."""
        pool, reader = self._extracting(tap_layers)
        waiting: deque[Future[HiddenStates]] = deque()
        todo = enumerate(rows)
        try:
            while True:
                while len(waiting) < pool.room and (following := next(todo, None)) is not None:
                    index, row = following
                    self._check_row(len(row), pool)
                    waiting.append(pool.submit(partial(_ask, reader, index, row, tuple(tap_layers))))
                if not waiting:
                    return
                yield waiting.popleft().result()
        finally:
            for unfetched in waiting:
                unfetched.cancel()

    @property
    def states_server(self) -> RunningServer:
        """One of the servers that hand out hidden states, once some were asked for."""
        assert self._states is not None
        return self._states[0].members[0].server

    def session(self, tap_layers: Sequence[int]) -> Session:
        raise UserError("a vLLM server cannot read a sequence step by step for decoding in this process: use "
                        "trainer.engines.transformers.TransformersEngine, as evaluate.engine does.")

    def _check_row(self, length: int, pool: Pool) -> None:
        limit = min(member.server.max_model_len for member in pool.members) - 1
        if not 0 < length <= limit:
            raise UserError(f"a row has {length} tokens where 1 to {limit} were expected (vLLM keeps room "
                            "for one token more, within its longest sequence and that of the model): set "
                            "target_engine.max_length accordingly, or leave the row out.")

    def _answering(self) -> Pool:
        with self._lock:
            if self._answers is None:
                urls = self.runtime.answer_urls
                if not urls:
                    self._stop_states()
                settings = replace(self.settings, max_model_len=self.max_length)
                check = partial(self._check_server, self.max_length, urls)
                self._answers = self._pool(settings, urls, "answers", check)
            return self._answers

    def _extracting(self, tap_layers: Sequence[int]) -> tuple[Pool, StatesReader]:
        with self._lock:
            wanted = set(tap_layers)
            if self._states is not None:
                known = set(self._states[1].layers)
                if wanted <= known:
                    return self._states
                wanted |= known
                self._stop_states()
            try:
                self._states = self._start_states(sorted(wanted))
            except BaseException:
                self._private.close()
                raise
            return self._states

    def _start_states(self, layers: list[int]) -> tuple[Pool, StatesReader]:
        assert self.folder is not None
        urls, shape = self.runtime.state_urls, Shape.read(self.folder, self.dtype)
        captured = sorted({*layers, shape.model_layers})
        length = shape.with_room(self.max_length)
        if urls:
            states = home = shared_folder(self.runtime.shared_folder)
        else:
            self._stop_answers()
            needed = 2 * self.runtime.in_flight * length * shape.bytes_per_token(len(captured))
            home = self._private.enter_context(private_folder(needed))
            states = home / "states"
        settings = with_connector(replace(self.settings, max_model_len=length), states,
                                  place_connector(home / "connector"), captured, self.states_batch)
        remedy = f"see its log in {self.runtime.logs}."
        if urls:
            remedy = (f"start it with `{start_command(settings, self.folder)}` (paths as it sees them), then "
                      "run the same command again.")
        reader = StatesReader(states, shape, captured, self.states_batch, remedy, self.runtime.file_wait_s)
        self._private.callback(reader.clear)

        def check(server: RunningServer) -> None:
            self._check_server(length, urls, server)
            asyncio.run(reader.probe(server))

        return self._pool(settings, urls, "states", check), reader

    def _pool(self, settings: VllmServer, urls: Sequence[str], kind: str,
              check: Callable[[RunningServer], None]) -> Pool:
        assert self.folder is not None
        folder = self.folder

        def make(url: str | None) -> RunningServer:
            self._started += 1
            log = Path(self.runtime.logs).expanduser() / f"{kind}-{self._started}.log"
            return replace(settings, url=url).serve(folder, log)

        pool = Pool([partial(make, url) for url in urls or [None]], check, self.runtime.in_flight,
                    self.runtime.patience_s)
        self._starting = pool
        try:
            if not self._open:  # left by now: nobody would stop what is started
                raise CancelledError
            pool.start()
        finally:
            self._starting = None
        return pool

    def _check_server(self, length: int, joined: Sequence[str], server: RunningServer) -> None:
        """What a joined server says about itself must fit the target."""
        if not joined:
            return
        assert self.folder is not None
        if server.max_model_len < length:
            raise UserError(f"the server at {server.url} takes sequences of {server.max_model_len} tokens, "
                            f"and {length} are needed: start it with --max-model-len {length}, or lower "
                            "target_engine.max_length.")
        theirs, differing = Path(server.root) / "config.json", []
        with suppress(OSError, ValueError):  # it may be on another machine, of another user, or no path
            differing = _differing(theirs, self.folder / "config.json")
        if differing:
            raise UserError(f"the server at {server.url} serves {server.root}, whose config.json differs "
                            f"from that of the target {self.folder} in {', '.join(differing)}: serve the "
                            "target.")

    def _stop_answers(self) -> None:
        pool, self._answers = self._answers, None
        if pool is not None:
            pool.stop()

    def _stop_states(self) -> None:
        pair, self._states = self._states, None
        with self._private:
            if pair is not None:
                pair[0].stop()


async def _ask(reader: StatesReader, index: int, row: Sequence[int], tap_layers: Sequence[int],
               server: RunningServer, http: httpx.AsyncClient) -> HiddenStates:
    return await reader.ask(server, http, index, row, tap_layers)


def _differing(theirs: Path, ours: Path) -> list[str]:
    one, other = json.loads(theirs.read_text()), json.loads(ours.read_text())
    return sorted(name for name in {*one, *other} - {*VOLATILE} if one.get(name) != other.get(name))
