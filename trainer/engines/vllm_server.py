"""A real vLLM server for one model, with or without a drafter: started here, or joined by its address.

vLLM lives in its own environment and is never imported; requests and answers are token ids. A started server
listens on the loopback interface only, is stopped with everything that it started, and cannot outlive this
process (`vllm_process`). A joined one is asked (`vllm_client`), never stopped, and its drafter is known by K
alone. Whatever goes wrong is a `UserError`, with the reason from the log of a started server.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Annotated, Literal, Self

from rich.console import Console

from trainer.cpu_build import WHOLE_PROMPTS
from trainer.engines import vllm_process
from trainer.engines.vllm_client import Progress, ServerLost, SpecCounters, VllmClient
from trainer.engines.vllm_installation import (
    FUSED,
    Installation,
    check_folder,
    check_port,
    find_installation,
    free_port,
)
from trainer.engines.vllm_request import request
from trainer.errors import UserError
from trainer.ranges import AtLeast, AtMost, Count, Like, Positive, SequenceLength, Text, Url
from trainer.records import Completion, Sampling

NAME = "target"
ServedDtype = Literal["auto", "bfloat16", "float16", "float32"]
PLAIN_LINE_SECONDS = 10.0
# By method what else it is started with: a prompt is asked again, and nothing may know its answer by then.
BESIDES = {"suffix": {"suffix_decoding_max_cached_requests": 0}}


@dataclass(frozen=True)
class VllmRuntime:
    """Where and how the server runs, nothing that changes an answer. `port` 0 takes a free one; `threads` is
    a list of cores such as "0-3" or "auto" for all (CPU builds only, as is `kv_cache_gib`)."""

    port: Annotated[int, AtLeast(0), AtMost(65535)]
    threads: Annotated[str, Like(r"auto|nobind|\d[\d,|-]*", "that is auto or cores such as 0-3")]
    kv_cache_gib: Count
    startup_timeout_s: Positive
    request_timeout_s: Positive
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"]


@dataclass(frozen=True)
class VllmServer:
    """Settings of a server; `serve` makes one for a model. `python` "auto" is `.venv-vllm` beside the project
    or in the current folder. With `url` a running server is joined, and all settings but `runtime` are its
    owner's."""

    python: Text
    url: Url | None
    dtype: ServedDtype
    max_model_len: SequenceLength
    max_num_seqs: Count
    enforce_eager: bool
    arguments: list
    environment: dict
    runtime: VllmRuntime

    def serve(self, model: Path, log: Path, speculator: Path | None = None, method: str | None = None,
              k: int | None = None, needs_v2: bool = False) -> RunningServer:
        """A context manager that serves `model`, with `speculator` drafting `k` tokens a step by `method`;
        `needs_v2` as its `Drafter` says.

        Everything that can be known without loading the model is checked here: raises UserError.
        """
        if (method is None) != (k is None) or (speculator is not None and method is None):
            raise ValueError("a speculator needs its method and k, and these need each other")
        self.preflight([] if method is None else [method])
        if self.url is None:
            check_folder(model, "target", tokenizer=True)
            if speculator is not None:
                check_folder(speculator, "speculator", tokenizer=False)
        return RunningServer(self, model, log, speculator, method, k, needs_v2)

    def preflight(self, methods: Sequence[str] = ()) -> str:
        """vLLM's version, if interpreter and port, or the server to join, are good, and what such methods of
        drafting need is there; else UserError."""
        if self.url is not None:
            return self.client(_base(self.url), None).version()
        found = find_installation(self.python)
        found.require_methods(methods)
        if self.runtime.port:
            check_port(self.runtime.port)
        return found.version

    def longest(self) -> int:
        """Tokens of prompt and answer together: the setting, or what the server to join says; UserError."""
        return self.max_model_len if self.url is None else \
            self.client(_base(self.url), None).model(NAME).max_length

    def require_idle(self, k: int | None) -> None:
        """Raises UserError unless the server to join drafts `k` tokens (None: nothing) and answers nobody."""
        self.preflight()
        client = self.client(_base(str(self.url)), None)
        client.require_drafts(k)
        client.require_idle()

    def client(self, url: str, death: Callable[[], ServerLost | None] | None) -> VllmClient:
        """A client for `url`, with the key that vLLM itself reads from the environment."""
        key = self.environment.get("VLLM_API_KEY") or os.environ.get("VLLM_API_KEY")
        return VllmClient(url, key, self.runtime.request_timeout_s, death)

    def command(self, python: str, model: Path, port: int, speculator: Path | None = None,
                method: str | None = None, k: int | None = None) -> list[str]:
        """The full command line of a server."""
        words = [python, "-m", "vllm.entrypoints.cli.main", "serve", _location(model), "--host", "127.0.0.1",
                 "--port", str(port), "--served-model-name", NAME, "--dtype", self.dtype,
                 "--max-model-len", str(self.max_model_len), "--max-num-seqs", str(self.max_num_seqs),
                 # the target's own defaults (a top_k, a penalty) would be added to what a request says
                 "--generation-config", "vllm", "--disable-uvicorn-access-log"]
        if self.enforce_eager:
            words.append("--enforce-eager")
        if method is not None:
            drafter = {"method": method, "num_speculative_tokens": k, **BESIDES.get(method, {})}
            if speculator is not None:
                drafter["model"] = _location(speculator)
            words += ["--speculative-config", json.dumps(drafter)]
        return words + [str(argument) for argument in self.arguments]

    def variables(self, found: Installation, offline: bool, shim: Path,
                  needs_v2: bool = False) -> dict[str, str]:
        """Environment of a server. The folder `shim` takes what it lacks, see `Installation.shim`."""
        variables = found.environment(self.runtime.threads, self.runtime.kv_cache_gib)
        variables["VLLM_LOGGING_LEVEL"] = self.runtime.log_level
        if offline:
            variables["HF_HUB_OFFLINE"] = "1"
        own = {name: str(value) for name, value in self.environment.items()}
        lacking = found.shim(shim, needs_v2, own.get(FUSED) == "1")
        search = os.pathsep.join(filter(None, [lacking.get("PYTHONPATH"), own.get("PYTHONPATH")]))
        return variables | lacking | own | ({"PYTHONPATH": search} if search else {})


class RunningServer:
    """One server between `__enter__` and `__exit__`. `version`, `url`, `served_name`, `root` (what it loaded
    the model from), `max_model_len` and `command` (empty when joined) stay readable afterwards; `k` is None
    without a drafter; `interpreted` says that the kernels of one that was started here are, so that its speed
    means nothing. Setting `abandoned` from another thread ends a start that is under way."""

    def __init__(self, settings: VllmServer, model: Path, log: Path, speculator: Path | None,
                 method: str | None, k: int | None, needs_v2: bool) -> None:
        self.settings, self.model, self.log = settings, model, log
        self.speculator, self.method, self.k, self.needs_v2 = speculator, method, k, needs_v2
        self.interpreted = False
        self.version = self.url = self.served_name = self.root = ""
        self.max_model_len = 0
        self.abandoned = False
        self.command: list[str] = []
        self.process: subprocess.Popen[bytes] | None = None
        self.shim = log.with_name(log.name + ".metadata")

    def __enter__(self) -> Self:
        try:
            if self.settings.url is None:
                self._start()
            else:
                self.url = _base(self.settings.url)
            self.client = self.settings.client(self.url, self.death if self.process else None)
            self._wait()
            self.version = self.client.version()
            self.served_name, self.max_model_len, self.root = self.client.model(NAME)
            if self.k is not None:
                self.client.require_drafts(self.k)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.stop()

    def complete(self, prompts: Sequence[Sequence[int]], sampling: Sampling, concurrency: int,
                 progress: Progress | None = None, keys: Sequence[str] | None = None,
                 end_ids: Sequence[int] = ()) -> list[Completion]:
        """Answers in the order of the prompts, with at most `concurrency` requests in flight.

        `progress(index, completion)` is called as each answer arrives, in any order. `keys` seed the sampling
        of each prompt (its index by default). `end_ids` end an answer besides the target's own end token; the
        token that ended it is part of it. Raises UserError when a request is refused or the server is lost.
        """
        keys = [str(index) for index in range(len(prompts))] if keys is None else keys
        bodies = [request(self.served_name, prompt, sampling, key, end_ids)
                  for prompt, key in zip(prompts, keys, strict=True)]
        return self.client.complete(bodies, concurrency, progress)

    def counters(self) -> SpecCounters:
        """Counters of speculation since the server's start; subtract two readings."""
        return self.client.counters()

    def require_idle(self) -> None:
        """Raises UserError while it answers others, or when it drafts what it should not."""
        self.client.require_drafts(self.k)
        self.client.require_idle()

    @property
    def attention_backend(self) -> str:
        """By vLLM's name, as its log has it; "unknown" for a joined server and where the log does not say."""
        return (self.command and vllm_process.attention_backend(self.log)) or "unknown"

    def stop(self) -> None:
        """Ends the server with everything that it started; nothing happens to a joined one."""
        if self.process is not None:
            vllm_process.stop(self.process)
        shutil.rmtree(self.shim, ignore_errors=True)

    def death(self) -> ServerLost | None:
        """Why a started server is gone; None while it runs."""
        status = None if self.process is None else vllm_process.exit_status(self.process)
        if status is None:
            return None
        causes = " | ".join(vllm_process.last_errors(self.log)) or "its log is empty"
        return ServerLost(f"the vLLM server ended with {vllm_process.describe_exit(status)}: {causes} "
                          f"(log: {self.log}); mend the cause and run the same command again.")

    def _start(self) -> None:
        found = find_installation(self.settings.python)
        self.interpreted = self.needs_v2 and found.cpu
        port = self.settings.runtime.port or free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.command = self.settings.command(found.python, self.model, port, self.speculator, self.method,
                                             self.k)
        if found.cpu and not any("chunked-prefill" in word for word in self.command):
            self.command.append(f"--{WHOLE_PROMPTS}")
        self.log.parent.mkdir(parents=True, exist_ok=True)
        local = all(folder.is_dir() for folder in (self.model, self.speculator or self.model))
        variables = self.settings.variables(found, local, self.shim, self.needs_v2)
        self.log.write_text(f"$ {shlex.join(self.command)}\n")
        self.process = vllm_process.start(self.command, variables, self.log)

    def _wait(self) -> None:
        """Waits until the engine is up; raises UserError if the server dies first or takes too long."""
        patience = self.settings.runtime.startup_timeout_s
        with _elapsed(f"vLLM server for {self.model.name} ({self.method or 'no drafter'})") as seconds:
            while not self.client.healthy():
                if (reason := self.death()) is not None:
                    raise reason
                if self.process is None:
                    raise ServerLost(f"the server to join at {self.url} is not healthy: wait until its "
                                     "/health answers 200, then run the same command again.")
                if self.abandoned:
                    raise ServerLost("the start of the vLLM server was given up.")
                if seconds() > patience:
                    raise UserError("the vLLM server was not up within "
                                    f"engine.runtime.startup_timeout_s={patience:g} s: see {self.log}, or "
                                    "raise that setting.")
                time.sleep(0.25)


def _location(model: Path) -> str:
    """An absolute path for a folder (the server runs elsewhere), a hub name as it is."""
    return str(model.resolve()) if model.is_dir() else str(model)


def _base(url: str) -> str:
    return url.rstrip("/").removesuffix("/v1")


@contextmanager
def _elapsed(what: str) -> Iterator[Callable[[], float]]:
    """Shows that `what` is starting; yields a function that gives the seconds so far and shows them."""
    console = Console(stderr=True, soft_wrap=True, highlight=False, markup=False)
    start = shown = time.monotonic()
    with console.status(f"starting {what}") if console.is_terminal else nullcontext() as status:

        def seconds() -> float:
            nonlocal shown
            now = time.monotonic()
            if status is not None:
                status.update(f"starting {what}: {now - start:.0f} s")
            elif now - shown >= PLAIN_LINE_SECONDS:
                console.print(f"starting {what}: {now - start:.0f} s")
                shown = now
            return now - start

        yield seconds
    console.print(f"{what} is up after {time.monotonic() - start:.1f} s")
