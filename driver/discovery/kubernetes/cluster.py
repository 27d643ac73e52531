"""The calls of the Kubernetes API behind a discovery: thin, and all of them may block. Needs the package `kubernetes`.

Objects come as the API's JSON: models of 1,000 pods would take seconds and much memory, and little of them is read.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Iterator
from typing import Any, Protocol

import msgspec

from elastic.driver.discovery.kubernetes.objects import Json
from elastic.errors import Invalid

CONNECT_S = 5.0
ANSWER_S = 10.0  # for a list, or for a watch to begin
WATCH_S = 60  # then the API server ends a watch, so that one whose connection is dead is noticed
PAGE = 500  # objects of one answer
NAMESPACE_FILE = "/var/run/secrets/kubernetes.io/serviceaccount/namespace"


class Refusal(enum.Enum):
    """Why the API server gave no answer to take."""

    UNREACHABLE = "it is unreachable"
    UNAUTHORIZED = "it rejects this token"
    FORBIDDEN = "this service account is not authorized"
    GONE = "it does not exist any more"
    OTHER = "it returns an error"


class ApiTrouble(Exception):
    """``detail``: what the server or the network said, for people."""

    def __init__(self, why: Refusal, detail: str = "") -> None:
        super().__init__(f"{why.value}{f' ({detail})' if detail else ''}")
        self.why = why


class Resource(enum.Enum):
    """What is watched; the value is its name in the API."""

    PODS = "pods"
    NODES = "nodes"


class KubernetesApi(Protocol):
    """One namespace's pods with one label selector, and the nodes. Calls raise ApiTrouble, and take bounded time."""

    namespace: str
    selector: str

    def all(self, kind: Resource) -> tuple[list[Json], str]:
        """All of them now, and the version to watch from."""

    def events(self, kind: Resource, version: str) -> Iterator[Json]:
        """What changes from there on, as ``{"type": ..., "object": ...}``, until the server ends it. Asks at once."""

    def delete_by_force(self, name: str, uid: str) -> None:
        """Forgets a pod of which nobody will say that it is gone. Nothing, if another has its name by now."""


def connection() -> tuple[Any, str]:
    """An ``ApiClient`` of the package `kubernetes`, and the namespace that goes without saying. Raises Invalid."""
    try:
        from kubernetes import client
        from kubernetes import config as untyped
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "kubernetes":
            raise
        raise Invalid(
            "the Kubernetes client for Python is missing: pip install 'hvd-elastic[kubernetes]'"
        ) from None
    config: Any = untyped
    settings: Any = client.Configuration()
    found = ""

    def of_pod(settings: Any) -> None:
        config.load_incluster_config(client_configuration=settings, try_refresh_token=False)

    try:
        of_pod(settings)
        # The client would keep a token for a minute, even one that is refused.
        settings.refresh_api_key_hook = of_pod
        with contextlib.suppress(OSError), open(NAMESPACE_FILE) as file:
            found = file.read().strip()
    except config.ConfigException:
        try:
            config.load_kube_config(client_configuration=settings)
            _, active = config.list_kube_config_contexts()
            found = active["context"].get("namespace", "")
        except Exception as error:  # of a file that may hold anything
            why = " ".join(str(error).split())[:300]
            raise Invalid(
                "no cluster found: this is not a pod with a service account, and no kubeconfig selects one"
                f" ({type(error).__name__}: {why}); see `kubectl config get-contexts`, and choose one with `kubectl"
                " config use-context NAME`"
            ) from None
    settings.retries = False
    return client.ApiClient(settings), found or "default"


class ApiServer:
    """The cluster in which this process is a pod, else that of the kubeconfig. Raises Invalid where neither is."""

    def __init__(self, selector: str, namespace: str | None = None) -> None:
        api, found = connection()
        from kubernetes import client

        self._api: Any = client.CoreV1Api(api)
        self._refused: Any = client.ApiException
        self.namespace = namespace or found
        self.selector = selector

    def all(self, kind: Resource) -> tuple[list[Json], str]:
        objects: list[Json] = []
        page = ""
        while True:
            response = self._call(
                kind, limit=PAGE, _continue=page or None, _request_timeout=(CONNECT_S, ANSWER_S)
            )
            with _answering(self._refused):
                answer = _decoded(response.data)
            about = answer.get("metadata") or {}
            objects += answer.get("items") or []
            page = about.get("continue") or ""
            if not page:
                return objects, str(about.get("resourceVersion", ""))

    def events(self, kind: Resource, version: str) -> Iterator[Json]:
        response = self._call(
            kind,
            watch=True,
            resource_version=version,
            allow_watch_bookmarks=True,
            timeout_seconds=WATCH_S,
            _request_timeout=(CONNECT_S, WATCH_S + ANSWER_S),
        )
        return self._lines(response)

    def _lines(self, response: Any) -> Iterator[Json]:
        rest = b""
        try:
            with _answering(self._refused):
                for chunk in response.stream(amt=None, decode_content=False):
                    *lines, rest = (rest + chunk).split(b"\n")
                    for line in lines:
                        if line.strip():
                            yield _decoded(line)
        finally:
            response.close()
            response.release_conn()

    def delete_by_force(self, name: str, uid: str) -> None:
        from kubernetes import client

        options = client.V1DeleteOptions(
            grace_period_seconds=0, preconditions=client.V1Preconditions(uid=uid)
        )
        try:
            with _answering(self._refused):
                self._api.delete_namespaced_pod(
                    name,
                    self.namespace,
                    body=options,
                    _request_timeout=(CONNECT_S, ANSWER_S),
                    _preload_content=False,
                )
        except ApiTrouble as error:
            if error.why is not Refusal.GONE:  # 404 and 409: it is gone already
                raise

    def _call(self, kind: Resource, **options: Any) -> Any:
        options = {name: value for name, value in options.items() if value is not None}
        with _answering(self._refused):
            if kind is Resource.NODES:
                return self._api.list_node(_preload_content=False, **options)
            return self._api.list_namespaced_pod(
                self.namespace, label_selector=self.selector, _preload_content=False, **options
            )


def _decoded(text: bytes) -> dict[str, Any]:
    answer = msgspec.json.decode(text)
    if not isinstance(answer, dict):
        raise ApiTrouble(Refusal.OTHER, "not a JSON object")
    return answer


@contextlib.contextmanager
def _answering(refused: type[Exception]) -> Iterator[None]:
    """Whatever goes wrong in the client or on the way is ApiTrouble."""
    import urllib3
    from kubernetes.config import ConfigException

    try:
        yield
    except refused as error:
        raise _refusal(int(getattr(error, "status", 0) or 0), error) from None
    except ConfigException as error:  # while the token's file is missing or empty
        raise ApiTrouble(Refusal.UNAUTHORIZED, _short(error)) from None
    except (urllib3.exceptions.HTTPError, OSError) as error:
        raise ApiTrouble(Refusal.UNREACHABLE, _short(error)) from None
    except msgspec.DecodeError as error:
        raise ApiTrouble(Refusal.OTHER, _short(error)) from None


REFUSALS = {
    401: Refusal.UNAUTHORIZED,
    403: Refusal.FORBIDDEN,
    404: Refusal.GONE,
    409: Refusal.GONE,
    410: Refusal.GONE,
}


def _refusal(code: int, error: Exception) -> ApiTrouble:
    said = f"HTTP {code}"
    # No Status of the API.
    with contextlib.suppress(ValueError, TypeError, AttributeError, KeyError):
        said = str(msgspec.json.decode(getattr(error, "body", "") or "")["message"])[:300]
    return ApiTrouble(REFUSALS.get(code, Refusal.OTHER), said)


def _short(error: Exception) -> str:
    """Without the address, which may hold a selector, and without a pool's name."""
    inner = getattr(error, "reason", None) or error
    return f"{type(inner).__name__}: {inner}".split("\n")[0][:200]
