"""The vLLM server as a process group that cannot outlive the trainer, and what its log says when it ends.

Between the trainer and vLLM stands a watcher: this very file, run as a script (so it uses the standard
library only). It leads the group, starts vLLM inside it, and ends the whole group when vLLM ends or when the
trainer is gone, even by SIGKILL. A death signal set with prctl would reach only the first process of vLLM and
would fire when the thread that started it ends, so it is not used. Linux only, as vLLM is.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType

GRACE_SECONDS = 10.0
WATCH_SECONDS = 0.2


def start(command: list[str], environment: dict[str, str], log: Path) -> subprocess.Popen[bytes]:
    """Start `command` under a watcher, in a session of its own; output goes to the end of `log`.

    It runs in the folder of the log: Python would put another current folder first in its search path.
    """
    watcher = [sys.executable, "-I", "-S", str(Path(__file__).resolve()), str(os.getpid()), *command]
    with log.open("ab") as output:
        return subprocess.Popen(
            watcher,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd=log.resolve().parent,
            start_new_session=True,
        )


def exit_status(process: subprocess.Popen[bytes]) -> int | None:
    """Exit code (negative: ended by that signal), or None while it runs.

    The process is left unreaped, so its number, which is also the group's, cannot be given to another before
    `stop` has signalled the group.
    """
    if process.returncode is not None:
        return process.returncode
    try:
        ended = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # another thread has just stopped it
        return process.wait()
    if ended is None:
        return None
    return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status


def stop(process: subprocess.Popen[bytes]) -> None:
    """End every process of the group: politely first, by force after `GRACE_SECONDS` or at an interrupt."""
    if process.returncode is not None:
        return
    try:
        os.killpg(process.pid, signal.SIGTERM)
        deadline = time.monotonic() + GRACE_SECONDS
        while exit_status(process) is None and time.monotonic() < deadline:
            time.sleep(0.05)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        while members(process.pid):  # its memory and its port are free only then
            time.sleep(0.02)
        process.wait()


def describe_exit(status: int) -> str:
    """Words for an exit status; shells and the watcher report a signal as 128 + its number."""
    number = -status if status < 0 else status - 128
    if number in set(signal.Signals):
        return f"signal {signal.Signals(number).name}"
    return f"exit code {status}"


PREFIX = re.compile(r"^(\([^)]*pid=\d+\)\s*)?([A-Z]+ \d\S+ \S+ \[[^]]*\]\s?)?")
CAUSE = re.compile(r"^[\w.]*(Error|Exception|Interrupt|Exit)\b.*: *\S|\berror: \S|^Fatal |out of memory"
                   r"|(died|exited) unexpectedly")
# What vLLM makes of a failure somewhere else, which never says why.
ECHO = re.compile(r"Engine core initialization failed|EngineDeadError|Worker failed with error|: cancelled$")
CHATTER = re.compile(r"nanobind|^- |resource_tracker|^warnings\.warn")


def last_errors(log: Path, count: int = 2) -> list[str]:
    """The last different lines of the log that name a cause; its last lines of any kind if none does."""
    lines = [PREFIX.sub("", line).strip() for line in log.read_text(errors="replace").splitlines()]
    lines = [line for line in lines if line and not CHATTER.search(line)]
    causes = [line for line in lines if CAUSE.search(line)]
    reasons = [line for line in causes if not ECHO.search(line)]
    return [line[:400] for line in list(dict.fromkeys(reasons or causes or lines))[-count:]]


CHOSEN = re.compile(r"\b(?:Using|Overriding with) (?:AttentionBackendEnum\.)?([A-Z][A-Z0-9_]*) "
                    r"(?:(?:attention )?backend\b(?! for)|out of potential backends)")


def attention_backend(log: Path) -> str | None:
    """The attention backend that vLLM says it chose, by its own name; several, as layers may differ, in the
    order of the log; None where it does not say."""
    text = log.read_text(errors="replace")
    found = dict.fromkeys(CHOSEN.findall(text))
    if not found and "device_config=cpu" in text:
        return "CPU_ATTN"  # the one that a CPU build has, but for MLA, which it names
    return ", ".join(found) or None


def members(group: int) -> list[int]:
    """Numbers of the processes of a group, without those that have ended and only wait to be reaped."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, its_group = entry.read_text().rpartition(")")[2].split()[:3]
        except (FileNotFoundError, ProcessLookupError):  # it ended while we looked
            continue
        if int(its_group) == group and state not in "ZX":
            found.append(int(entry.parent.name))
    return found


def watch(parent: int, command: list[str]) -> int:
    """Run `command` until it ends or process `parent` is no longer ours; its status as a shell gives it."""

    def stay(number: int, frame: FrameType | None) -> None:
        """The watcher goes last. (A signal that is ignored instead would stay ignored in vLLM.)"""

    for polite in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(polite, stay)
    child = subprocess.Popen(command)
    deadline = None
    while (status := child.poll()) is None:
        if deadline is None and os.getppid() != parent:
            os.killpg(0, signal.SIGTERM)
            deadline = time.monotonic() + GRACE_SECONDS
        if deadline is not None and time.monotonic() > deadline:
            os.killpg(0, signal.SIGKILL)
        time.sleep(WATCH_SECONDS)
    while left := [member for member in members(os.getpgrp()) if member != os.getpid()]:
        for member in left:
            with suppress(ProcessLookupError):
                os.kill(member, signal.SIGKILL)
        time.sleep(0.05)
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(watch(int(sys.argv[1]), sys.argv[2:]))
