"""Client for the Kubernetes API calls that discovery needs. All calls may block. Requires the package `kubernetes`.

Objects are returned as JSON, because the package takes seconds and much memory to create its model objects for 1,000
pods.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Iterator
from typing import Any, Protocol

import msgspec

from elastic.driver.discovery.kubernetes.api_objects import Json
from elastic.errors import Invalid

CONNECT_S = 5.0
ANSWER_S = 10.0  # time limit for listing objects or starting a watch, in seconds
# seconds after which the API server ends a watch, so that dead connections are detected
WATCH_S = 60
PAGE = 500  # maximum number of objects per response
NAMESPACE_FILE = "/var/run/secrets/kubernetes.io/serviceaccount/namespace"


class ApiErrorKind(enum.Enum):
    """Reason for the failure of a Kubernetes API call."""

    UNREACHABLE = "it is unreachable"
    UNAUTHORIZED = "it rejects this token"
    FORBIDDEN = "this service account is not authorized"
    GONE = "it no longer exists"
    OTHER = "it returns an error"


class ApiError(Exception):
    """Error raised when an API call fails. ``detail`` is the error message of the server or the network."""

    def __init__(self, why: ApiErrorKind, detail: str = "") -> None:
        super().__init__(f"{why.value}{f' ({detail})' if detail else ''}")
        self.why = why


class Resource(enum.Enum):
    """Resource to watch. The value is the resource's name in the API."""

    PODS = "pods"
    NODES = "nodes"


class KubernetesApi(Protocol):
    """Access to all nodes, and to the pods in one namespace that match a label selector.

    All methods have time limits, and raise ApiError if a call fails.
    """

    namespace: str
    selector: str

    def all(self, kind: Resource) -> tuple[list[Json], str]:
        """Return all objects of a kind, and the resource version from which to start a watch."""

    def events(self, kind: Resource, version: str) -> Iterator[Json]:
        """Watch the changes since ``version``. The request is sent by this call, not by the first iteration.

        Each change is yielded as ``{"type": ..., "object": ...}``, until the server ends the watch.
        """

    def delete_by_force(self, name: str, uid: str) -> None:
        """Delete a pod without waiting for its processes. No effect if a newer pod has the same name.

        Use this for a pod on a node that can no longer report the pod's end.
        """


def connection() -> tuple[Any, str]:
    """Return an ``ApiClient`` of the package `kubernetes`, and the default namespace.

    Raises:
        Invalid: the package `kubernetes` is not installed, or no cluster is configured.
    """
    try:
        from kubernetes import client
        from kubernetes import config as untyped
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "kubernetes":
            raise
        raise Invalid(
            "the Kubernetes client for Python is not installed: run pip install 'hvd-elastic[kubernetes]'"
        ) from None
    config: Any = untyped
    settings: Any = client.Configuration()
    found = ""

    def of_pod(settings: Any) -> None:
        config.load_incluster_config(client_configuration=settings, try_refresh_token=False)

    try:
        of_pod(settings)
        # Read the token for each request, because the client would use a rejected token for up to a minute.
        settings.refresh_api_key_hook = of_pod
        with contextlib.suppress(OSError), open(NAMESPACE_FILE) as file:
            found = file.read().strip()
    except config.ConfigException:
        try:
            config.load_kube_config(client_configuration=settings)
            _, active = config.list_kube_config_contexts()
            found = active["context"].get("namespace", "")
        except Exception as error:
            # The configuration file may have any content, so any exception is possible.
            why = " ".join(str(error).split())[:300]
            raise Invalid(
                "no cluster found: this is not a pod with a service account, and no kubeconfig selects one"
                f" ({type(error).__name__}: {why}); see `kubectl config get-contexts`, and choose one with `kubectl"
                " config use-context NAME`"
            ) from None
    settings.retries = False
    return client.ApiClient(settings), found or "default"


class ApiClient:
    """Client of the cluster in which this process is a pod, or of the cluster in the kubeconfig.

    Raises:
        Invalid: this process is not in a pod, and there is no kubeconfig.
    """

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
        except ApiError as error:
            # Ignore status 404 and 409: the pod no longer exists.
            if error.why is not ApiErrorKind.GONE:
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
        raise ApiError(
            ApiErrorKind.OTHER,
            "the API server returned a response that is not a JSON object: check for a proxy in"
            " front of it",
        )
    return answer


@contextlib.contextmanager
def _answering(refused: type[Exception]) -> Iterator[None]:
    """Context manager that converts errors of the client and the network to ApiError."""
    import urllib3
    from kubernetes.config import ConfigException

    try:
        yield
    except refused as error:
        raise _refusal(int(getattr(error, "status", 0) or 0), error) from None
    except ConfigException as error:
        # The token file is missing or empty, which may be temporary.
        raise ApiError(ApiErrorKind.UNAUTHORIZED, _short(error)) from None
    except (urllib3.exceptions.HTTPError, OSError) as error:
        raise ApiError(ApiErrorKind.UNREACHABLE, _short(error)) from None
    except msgspec.DecodeError as error:
        raise ApiError(ApiErrorKind.OTHER, _short(error)) from None


REFUSALS = {
    401: ApiErrorKind.UNAUTHORIZED,
    403: ApiErrorKind.FORBIDDEN,
    404: ApiErrorKind.GONE,
    409: ApiErrorKind.GONE,
    410: ApiErrorKind.GONE,
}


def _refusal(code: int, error: Exception) -> ApiError:
    detail = f"HTTP {code}"
    # keep the HTTP code if the body is not a Status object
    with contextlib.suppress(ValueError, TypeError, AttributeError, KeyError):
        detail = str(msgspec.json.decode(getattr(error, "body", "") or "")["message"])[:300]
    return ApiError(REFUSALS.get(code, ApiErrorKind.OTHER), detail)


def _short(error: Exception) -> str:
    inner = getattr(error, "reason", None) or error
    return f"{type(inner).__name__}: {inner}".split("\n")[0][:200]
