"""A process of its own in which Triton's interpreter runs kernels on this CPU. TRITON_INTERPRET decides when
a module of kernels is imported, so that the tests' own process never has it. """

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

from trainer.kernels.verification import Verification, Verified


class Interpreter:
    """Starts when it is first asked for something."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None

    def ask(self, function: str, *given: Any, **named: Any) -> Any:
        """What the function of `triton_worker` answers; if it fails, an AssertionError with its trace."""
        if self.process is None:
            environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
            self.process = subprocess.Popen(
                [sys.executable, Path(__file__).with_name("triton_worker.py")], env=environment,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self.process.stdin and self.process.stdout
        pickle.dump((function, given, named), self.process.stdin)
        self.process.stdin.flush()
        failed, answer = pickle.load(self.process.stdout)
        assert not failed, answer
        return answer

    def verify(self, step: Verification) -> Verified:
        return self.ask("verify", step)

    def close(self) -> None:
        if self.process is not None and self.process.stdin is not None:
            self.process.stdin.close()
            self.process.wait(timeout=60)
            self.process = None


INTERPRETER = Interpreter()
