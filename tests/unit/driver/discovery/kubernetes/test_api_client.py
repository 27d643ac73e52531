"""Client of the Kubernetes API, tested with answers of a real API server (1.20.2): conversation.json."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from elastic.driver.discovery.kubernetes.api_client import (
    ApiClient,
    ApiError,
    ApiErrorKind,
    KubernetesApi,
    Resource,
    connection,
)
from elastic.errors import Invalid
from harness.golden import raises

RECORDED = {
    each["name"]: each
    for each in json.loads((Path(__file__).parent / "conversation.json").read_text())
}


class Replay:
    """A server that gives these answers in order, and records the requests."""

    def __init__(self, *names: str) -> None:
        left = [RECORDED[name] for name in names]
        questions: list[tuple[str, dict[str, list[str]], str]] = []

        class Answer(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self) -> None:
                place = urlsplit(self.path)
                length = int(self.headers.get("Content-Length", 0))
                body = self.rfile.read(length).decode()
                questions.append((f"{self.command} {place.path}", parse_qs(place.query), body))
                recorded = left.pop(0)
                self.send_response(recorded["status"])
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
                for line in recorded["lines"]:
                    data = json.dumps(line).encode() + b"\n"
                    for part in (data[:7], data[7:]):  # a line may arrive in pieces
                        self.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))
                self.wfile.write(b"0\r\n\r\n")

            do_GET = do_DELETE = answer

            def log_message(self, *_: Any) -> None:
                pass

        self.questions = questions
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def port(self) -> int:
        return int(self.server.server_address[1])

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return ``ask(*answers)``, which creates a client and the server with these answers."""
    servers = []

    def begin(*names: str, namespace: str | None = None) -> tuple[KubernetesApi, Replay]:
        servers.append(Replay(*names))
        url = f"http://127.0.0.1:{servers[-1].port}"
        config = {
            "current-context": "c",
            "contexts": [
                {"name": "c", "context": {"cluster": "k", "user": "u", "namespace": "lab"}}
            ],
            "clusters": [{"name": "k", "cluster": {"server": url}}],
            "users": [{"name": "u", "user": {"token": "secret"}}],
        }
        path = tmp_path / "kubeconfig"
        path.write_text(json.dumps(config))
        monkeypatch.setenv("KUBECONFIG", str(path))
        monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(path))
        return ApiClient("app=w", namespace), servers[-1]

    yield begin
    for server in servers:
        server.close()


def test_list_of_several_pages_and_its_version(ask):
    api, server = ask("page 1", "page 2")
    pods, version = api.all(Resource.PODS)
    assert [pod["metadata"]["name"] for pod in pods] == ["w-0", "w-1"] and version == "224"
    (first, asked, _), (_, then, _) = server.questions
    assert first == "GET /api/v1/namespaces/lab/pods"
    assert asked == {"labelSelector": ["app=w"], "limit": ["500"]}
    assert then["continue"] == [RECORDED["page 1"]["lines"][0]["metadata"]["continue"]]


def test_watch_yields_each_event_until_the_server_ends_the_watch(ask):
    api, server = ask("watch")
    events = [*api.events(Resource.PODS, "224")]
    assert [(each["type"], each["object"]["metadata"].get("name")) for each in events] == [
        ("MODIFIED", "w-0"),
        ("MODIFIED", "w-1"),
        ("DELETED", "w-1"),
        ("BOOKMARK", None),
    ]
    [(_, asked, _)] = server.questions
    assert asked["resourceVersion"] == ["224"] and asked["allowWatchBookmarks"] == ["true"]


def test_expired_version_is_an_event(ask):
    api, _ = ask("watch from before the restart")
    [event] = api.events(Resource.PODS, "1")
    assert (event["type"], event["object"]["code"]) == ("ERROR", 410)


@pytest.mark.parametrize(
    ("answer", "why"),
    [("unknown token", ApiErrorKind.UNAUTHORIZED), ("no right", ApiErrorKind.FORBIDDEN)],
)
def test_rejections_contain_the_servers_message(ask, answer, why):
    api, _ = ask(answer)
    with raises(ApiError) as raised:
        api.all(Resource.PODS)
    assert raised.value.why is why and "secret" not in str(raised.value)


def test_pod_reads_its_token_for_each_request_and_an_empty_token_is_rejected(tmp_path, monkeypatch):
    token, authority = tmp_path / "token", tmp_path / "ca.crt"
    authority.write_text("read when somebody connects")
    where = "kubernetes.config.incluster_config"
    monkeypatch.setattr(f"{where}.SERVICE_TOKEN_FILENAME", str(token))
    monkeypatch.setattr(f"{where}.SERVICE_CERT_FILENAME", str(authority))
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "1")
    token.write_text("first")
    client, _ = connection()
    for text in ("first", "second"):
        token.write_text(text)
        assert client.configuration.auth_settings()["BearerToken"]["value"] == f"bearer {text}"
    api = ApiClient("app=w")
    token.write_text("")
    with raises(ApiError) as raised:
        api.all(Resource.PODS)
    assert raised.value.why is ApiErrorKind.UNAUTHORIZED


def test_nodes_have_no_namespace_and_a_watch_is_rejected_at_once(ask):
    api, server = ask("no right to nodes")
    with raises(ApiError):
        api.events(Resource.NODES, "1")
    assert server.questions[0][0] == "GET /api/v1/nodes"


@pytest.mark.parametrize("answer", ["delete with another uid", "delete of none"])
def test_missing_pod_needs_no_deletion(ask, answer):
    api, server = ask(answer)
    api.delete_by_force("w-0", "uid-1")
    [(asked, _, body)] = server.questions
    assert asked == "DELETE /api/v1/namespaces/lab/pods/w-0"
    options = json.loads(body)
    assert options["gracePeriodSeconds"] == 0 and options["preconditions"] == {"uid": "uid-1"}


def test_unreachable_server_is_an_error(ask):
    api, server = ask()
    server.close()
    with pytest.raises(ApiError) as raised:
        api.all(Resource.PODS)
    assert raised.value.why is ApiErrorKind.UNREACHABLE


def test_namespace_may_be_chosen(ask):
    api, server = ask("page 2", namespace="other")
    api.all(Resource.PODS)
    assert api.namespace == "other" and "/namespaces/other/" in server.questions[0][0]


def test_missing_cluster_is_reported_with_the_places_searched(tmp_path, monkeypatch):
    missing = str(tmp_path / "none")
    monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", missing)
    with raises(Invalid):
        ApiClient("app=w")
