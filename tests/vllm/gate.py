"""A gate before a real server: what comes through it can be cut off in the middle, and let through again."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from typing import Self

from vllm_support import address


class Gate:
    """Forwards connections to the server at `url`. `cut_when()` is asked before every request: once it says
    True, all connections end and none is accepted, until `open()`."""

    def __init__(self, url: str) -> None:
        self.behind = address(url)
        self.cut_when: Callable[[], bool] = lambda: False
        self.ends: set[socket.socket] = set()
        self.port = 0
        self.open()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *details: object) -> None:
        self.cut()

    def open(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", self.port))
        self.port = self.listener.getsockname()[1]
        threading.Thread(target=self._accept, args=(self.listener,), daemon=True).start()

    def cut(self) -> None:
        for end in (self.listener, *self.ends):
            finish(end)

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):  # cut
            while True:
                near, _ = listener.accept()
                far = socket.create_connection(self.behind)
                self.ends |= {near, far}
                for ends in ((near, far, True), (far, near, False)):
                    threading.Thread(target=self._forward, args=ends, daemon=True).start()

    def _forward(self, one: socket.socket, other: socket.socket, asks: bool) -> None:
        with contextlib.suppress(OSError):  # cut, or left
            while data := one.recv(1 << 16):
                if asks and self.cut_when():
                    self.cut()
                other.sendall(data)
        for end in (one, other):
            finish(end)


def finish(end: socket.socket) -> None:
    """Closing alone would not end it for as long as another thread waits for what comes."""
    with contextlib.suppress(OSError):  # not connected any more
        end.shutdown(socket.SHUT_RDWR)
    end.close()
