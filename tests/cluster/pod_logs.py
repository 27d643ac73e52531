"""Requests of the API server to a kubelet for logs: ``/containerLogs/NAMESPACE/POD/CONTAINER``."""

from __future__ import annotations

import ssl
import subprocess
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

LOOK_S = 0.05


def serve(folder: Path, logs: Path, ends: Callable[[str, str], bool]) -> int:
    """Serve logs; return the port. ``ends``: whether this pod, of namespace and name, writes no more."""

    class Answer(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            place = urlsplit(self.path)
            _, _, namespace, pod, _ = place.path.split("/")
            asked = {name: values[0] for name, values in parse_qs(place.query).items()}
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            self._copy(namespace, pod, asked)
            self.wfile.write(b"0\r\n\r\n")

        def _copy(self, namespace: str, pod: str, asked: dict[str, str]) -> None:
            number = 0
            with open(logs / f"{namespace}_{pod}.log", "rb") as file:
                while True:
                    over = ends(namespace, pod)
                    while line := file.readline():
                        # A real one stores the time of each line; here they only need to increase.
                        stamp = b"2026-01-01T00:00:%02d.%09dZ " % divmod(number, 10**9)
                        data = (stamp if asked.get("timestamps") == "true" else b"") + line
                        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
                        number += 1
                    if over or asked.get("follow") != "true":
                        return
                    time.sleep(LOOK_S)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    server.daemon_threads = True
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    files = ["-keyout", "key", "-out", "certificate", "-subj", "/CN=kubelet"]
    subprocess.run(
        ["openssl", "req", "-x509", *curve, *files],
        cwd=folder,
        check=True,
        capture_output=True,
        timeout=30,
    )
    context.load_cert_chain(folder / "certificate", folder / "key")
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return int(server.server_address[1])
