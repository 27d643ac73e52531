"""A real S3 server, moto's, behind a proxy that can inject faults: it answers 503, closes, or hangs.

`moto_server` is found in the path, or in the folder that MOTO_BIN names: its packages and s3fs's may not agree on one
botocore.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from harness.ports import free_port

START_S = 60.0
UNAVAILABLE = (
    b"HTTP/1.1 503 Slow Down\r\nContent-Type: application/xml\r\nContent-Length: 44\r\n"
    b"Connection: close\r\n\r\n<Error><Code>SlowDown</Code></Error>        "
)


def moto_server() -> str | None:
    return shutil.which("moto_server", path=os.environ.get("MOTO_BIN", os.environ["PATH"]))


class FaultyProxy:
    """Passes connections on to a port. ``trouble``: "503", "close", or "hang", after which a connection that hung is
    dead: neither side hears of it again.
    """

    def __init__(self, port: int) -> None:
        self._inner = port
        self._trouble = ""
        self._open: set[socket.socket] = set()
        self._hung: list[socket.socket] = []
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.port: int = self._listener.getsockname()[1]
        self.refused = 0  # connections with trouble
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def trouble(self) -> str:
        return self._trouble

    @trouble.setter
    def trouble(self, kind: str) -> None:
        with self._lock:
            self._trouble = kind
            for each in self._open if kind in ("close", "503") else ():
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while True:
            try:
                outer, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(outer,), daemon=True).start()

    def _serve(self, outer: socket.socket) -> None:
        if self._refuse(outer):
            return
        try:
            inner = socket.create_connection(("127.0.0.1", self._inner))
        except OSError:
            outer.close()
            return
        with self._lock:
            self._open |= {outer, inner}
        back = threading.Thread(target=self._pass_on, args=(inner, outer), daemon=True)
        back.start()
        self._pass_on(outer, inner)
        back.join()
        with self._lock:
            self._open -= {outer, inner}
            hung = self._trouble == "hang" or outer in self._hung
        if hung:  # open, so that the other side receives nothing
            self._hung.append(outer)
        else:
            outer.close()
        inner.close()

    def _refuse(self, outer: socket.socket) -> bool:
        kind = self._trouble
        if not kind:
            return False
        self.refused += 1
        match kind:
            case "503":
                with contextlib.suppress(OSError):
                    outer.recv(1 << 16)
                    outer.sendall(UNAVAILABLE)
                outer.close()
            case "close":
                outer.close()
            case "hang":
                self._hung.append(outer)
        return True

    def _pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while block := source.recv(1 << 16):
                if self._trouble == "hang":
                    self.refused += 1
                    self._hung += [source, sink]
                    return
                sink.sendall(block)
        if source not in self._hung:
            with contextlib.suppress(OSError):
                sink.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._listener.close()
        for each in [*self._open, *self._hung]:
            each.close()


@contextlib.contextmanager
def one_store(folder: Path, bucket: str) -> Iterator[tuple[FaultyProxy, dict[str, str]]]:
    """Start the proxy; yield it and the environment in which s3:// leads to it."""
    program = moto_server()
    assert program is not None
    port = free_port()
    with open(folder / "moto.log", "wb") as log:
        command = [program, "-H", "127.0.0.1", "-p", str(port)]
        process = subprocess.Popen(command, stdout=log, stderr=log)
    door = FaultyProxy(port)
    try:
        deadline = time.monotonic() + START_S
        while True:
            try:
                with socket.create_connection(("127.0.0.1", port), 1.0) as inner:
                    make = f"PUT /{bucket} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Length: 0"
                    inner.sendall(f"{make}\r\nConnection: close\r\n\r\n".encode())
                    assert b"200" in inner.makefile("rb").readline()
                break
            except OSError:
                assert time.monotonic() < deadline, (folder / "moto.log").read_text()
                time.sleep(0.1)
        yield (
            door,
            {
                "AWS_ENDPOINT_URL": f"http://127.0.0.1:{door.port}",
                "AWS_ACCESS_KEY_ID": "testing",
                "AWS_SECRET_ACCESS_KEY": "testing",
                "AWS_DEFAULT_REGION": "us-east-1",
            },
        )
    finally:
        door.close()
        process.terminate()
        process.wait(10)
