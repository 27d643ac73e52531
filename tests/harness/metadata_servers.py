"""Metadata servers of clouds on loopback, as their documentation describes them: tokens, headers, long polls, errors.

A test sets their answers while they are queried.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, TypeVar
from urllib.parse import parse_qs, urlsplit

TOKEN = "a-token"
C = TypeVar("C", bound="Cloud")


class Cloud(ThreadingHTTPServer):
    """``trouble``: "hang", "close", "garbage", or a status of all answers."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.trouble: str | int = ""
        self.changed = threading.Condition()
        self.asked: list[str] = []

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def answer(self, handler: _Handler, body: bytes) -> None:
        raise NotImplementedError

    def change(self, **fields: Any) -> None:
        with self.changed:
            for name, value in fields.items():
                setattr(self, name, value)
            self.changed.notify_all()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Cloud

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _any(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length)
        self.server.asked.append(f"{self.command} {self.path}")
        match self.server.trouble:
            case "hang":
                with self.server.changed:
                    self.server.changed.wait_for(lambda: self.server.trouble != "hang", 60)
                self.close_connection = True
            case "close":
                self.close_connection = True
            case "garbage":
                self.say(200, b"<html>sign in</html>")
            case int() as status:
                self.say(status, b"")
            case _:
                self.server.answer(self, body)

    do_GET = do_PUT = do_POST = _any

    def say(self, status: int, body: bytes | str | dict[str, Any] = b"", **headers: str) -> None:
        data = json.dumps(body).encode() if isinstance(body, dict) else body
        data = data.encode() if isinstance(data, str) else data
        self.send_response(status)  # with Server and Date
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


class AwsCloud(Cloud):
    """Instance metadata service v2: requires a token."""

    action: dict[str, str] | None = None
    rebalance = False
    tokens = 0

    def interrupts(self, within_s: float, action: str = "terminate") -> None:
        at = datetime.now(timezone.utc) + timedelta(seconds=within_s)
        self.change(action={"action": action, "time": at.strftime("%Y-%m-%dT%H:%M:%SZ")})

    def forget_tokens(self) -> None:
        self.tokens += 1

    def answer(self, handler: _Handler, body: bytes) -> None:
        token = f"{TOKEN}-{self.tokens}"
        if handler.path == "/latest/api/token":
            ttl = handler.headers.get("X-aws-ec2-metadata-token-ttl-seconds", "")
            right = handler.command == "PUT" and ttl.isdecimal()
            return handler.say(200 if right else 400, token if right else b"")
        if handler.headers.get("X-aws-ec2-metadata-token") != token:
            return handler.say(401)
        match handler.path:
            case "/latest/meta-data/":
                handler.say(200, "ami-id\ninstance-id\n")
            case "/latest/meta-data/spot/instance-action" if self.action is not None:
                handler.say(200, self.action)
            case "/latest/meta-data/events/recommendations/rebalance" if self.rebalance:
                handler.say(200, {"noticeTime": "2026-11-24T03:00:00Z"})
            case _:
                handler.say(404)


class GoogleServer(Cloud):
    """Requires its header; answers wait for a change of a value with the given tag."""

    preempted = "FALSE"
    maintenance = "NONE"

    def _tag(self) -> str:
        return f"{self.preempted}-{self.maintenance}"

    def answer(self, handler: _Handler, body: bytes) -> None:
        flavor = {"Metadata_Flavor": "Google"}
        if handler.headers.get("Metadata-Flavor") != "Google":
            return handler.say(403)
        url = urlsplit(handler.path)
        if url.path == "/computeMetadata/v1/":
            return handler.say(200, "instance/\n", **flavor)
        if url.path != "/computeMetadata/v1/instance/":
            return handler.say(404)
        asked = {name: values[0] for name, values in parse_qs(url.query).items()}
        if asked.get("wait_for_change") == "true":
            with self.changed:
                within_s = float(asked["timeout_sec"])
                self.changed.wait_for(lambda: self._tag() != asked["last_etag"], within_s)
        told = {"id": 7, "preempted": self.preempted, "maintenanceEvent": self.maintenance}
        return handler.say(200, told, ETag=self._tag(), **flavor)


class AzureServer(Cloud):
    """Requires its header. Events are those of a whole scale set, until they are acknowledged."""

    own_name = "worker_3"

    def __init__(self) -> None:
        super().__init__()
        self.events: list[dict[str, Any]] = []
        self.acknowledged: list[str] = []

    def announces(self, kind: str, within_s: float, *, of: str = own_name, id: str = "E1") -> None:
        at = datetime.now(timezone.utc) + timedelta(seconds=within_s)
        event = {
            **{"EventId": id, "EventType": kind, "ResourceType": "VirtualMachine"},
            **{"Resources": [of], "EventStatus": "Scheduled"},
            "NotBefore": format_datetime(at, usegmt=True),
            **{"Description": "", "EventSource": "Platform", "DurationInSeconds": -1},
        }
        self.change(events=[*self.events, event])

    def answer(self, handler: _Handler, body: bytes) -> None:
        url = urlsplit(handler.path)
        if handler.headers.get("Metadata") != "true" or "api-version" not in url.query:
            return handler.say(400, {"error": "Bad request"})
        if url.path == "/metadata/instance/compute/name":
            return handler.say(200, self.own_name)
        if url.path != "/metadata/scheduledevents":
            return handler.say(404)
        if handler.command == "POST":
            started = [each["EventId"] for each in json.loads(body)["StartRequests"]]
            self.acknowledged += started
            self.change(events=[e for e in self.events if e["EventId"] not in started])
            return handler.say(200)
        return handler.say(200, {"DocumentIncarnation": 1, "Events": self.events})


@contextmanager
def served(cloud: C) -> Iterator[C]:
    thread = threading.Thread(target=cloud.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield cloud
    finally:
        cloud.change(trouble="close")
        cloud.shutdown()
        cloud.server_close()
        thread.join()
