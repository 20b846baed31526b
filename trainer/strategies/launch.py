"""Starts the processes of this machine that train together, and sees to it that they end together.

They get the command line and the environment that torchrun would give them. One that fails ends the others;
when this process is gone, even by SIGKILL, they notice that their standard input has ended and go, too. Only
the first one may print; what ends one of them is told here."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from trainer.errors import Several, UserError
from trainer.strategies import meeting
from trainer.strategies.world import AGENT, ATTEMPT, REPORT, World

GRACE_SECONDS = 10.0  # for one that was asked to end
LATER_SECONDS = 3.0   # for what else fails by the same cause, and may know it better
WATCH_SECONDS = 0.05


def launch(command: Sequence[str], processes: int, what: str = "") -> None:
    """Runs `command` in `processes` processes to its end; they find `what` in `meeting.awaited`. Raises
    UserError with what one of them had to say to the user, or with what became of it."""
    store = meeting.host()
    meeting.begin(meeting.part(store, World()), what)
    with tempfile.TemporaryDirectory(prefix="trainer-") as folder:
        reports = [Path(folder, str(rank)) for rank in range(processes)]
        running: list[subprocess.Popen[bytes]] = []
        try:
            for rank, report in enumerate(reports):
                running.append(_start(command, rank, processes, store.port, report))
            while any(process.poll() is None for process in running) and not _failed(running):
                time.sleep(WATCH_SECONDS)
            deadline = time.monotonic() + LATER_SECONDS
            while any(process.poll() is None for process in running) and time.monotonic() < deadline:
                time.sleep(WATCH_SECONDS)
            ended = [process.poll() for process in running]
        finally:
            _stop(running)
        _tell(reports, ended)


def _start(command: Sequence[str], rank: int, processes: int, port: int,
           report: Path) -> subprocess.Popen[bytes]:
    threads = max(1, len(os.sched_getaffinity(0)) // processes)
    own = {"RANK": rank, "WORLD_SIZE": processes, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": processes,
           "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, AGENT: True, ATTEMPT: World().attempt,
           REPORT: report}
    # the level: DDP tells each process that a search for unused parameters found none
    environment = {"OMP_NUM_THREADS": str(threads), "TORCH_CPP_LOG_LEVEL": "ERROR", **os.environ,
                   **{name: str(value) for name, value in own.items()}}
    return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, start_new_session=True,
                            stdout=subprocess.DEVNULL if rank else None)


def _failed(running: Sequence[subprocess.Popen[bytes]]) -> bool:
    return any(process.poll() for process in running)


def _stop(running: Sequence[subprocess.Popen[bytes]]) -> None:
    """Ends all of them, politely first."""
    try:
        for process in running:
            if process.poll() is None:
                process.terminate()
        deadline = time.monotonic() + GRACE_SECONDS
        while any(process.poll() is None for process in running) and time.monotonic() < deadline:
            time.sleep(WATCH_SECONDS)
    finally:
        for process in running:
            process.kill()
            process.wait()
            assert process.stdin is not None
            process.stdin.close()


def _tell(reports: Sequence[Path], ended: Sequence[int | None]) -> None:
    """Raises what the processes had to say, the user's own matter first."""
    said = [json.loads(report.read_text()) for report in reports if report.exists()]
    if problems := list(dict.fromkeys(each for one in said for each in one["problems"])):
        raise Several(problems)
    for rank, status in enumerate(ended):
        number = -status if status is not None and status < 0 else (status or 0) - 128
        if number > 0:
            name = signal.Signals(number).name
            raise UserError(f"process {rank} of {len(ended)} that trained was ended by signal {name}; the "
                            "same command goes on from the last checkpoint")
    if any(ended) or None in ended:
        faults = [one["fault"] for one in said if one["fault"]]
        raise RuntimeError("\n".join([f"the processes ended with {list(ended)}", *faults]))


@contextmanager
def reporting(world: World) -> Iterator[None]:
    """In a process that was launched: what ends it goes to who launched it, not to the user, who would read
    it once from each."""
    assert world.report is not None
    threading.Thread(target=_end_with_the_launcher, daemon=True).start()
    try:
        yield
    except KeyboardInterrupt as error:
        raise SystemExit(128 + int(error.args[0] if error.args else signal.SIGINT)) from None
    except Exception as error:
        problems = error.problems if isinstance(error, Several) else [str(error)]
        user = isinstance(error, UserError)
        found: dict[str, Any] = {"problems": problems if user else [],
                                 "fault": None if user else traceback.format_exc()}
        beside = Path(f"{world.report}.partial")
        with suppress(FileNotFoundError):  # nobody waits for it any more
            beside.write_text(json.dumps(found))
            beside.rename(world.report)
        raise SystemExit(2 if user else 1) from error


def _end_with_the_launcher() -> None:
    while os.read(0, 1):
        continue
    os.kill(os.getpid(), signal.SIGKILL)
