"""Connection to one member of etcd. Distinguishes requests without a response from rejected requests.

Uses the messages and stubs of ``aetcd``, but not its client, which supports neither TLS nor several members.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from elastic.driver.network.credentials import EtcdAccess
from elastic.errors import ElasticError, Invalid

Answer = TypeVar("Answer")

OPTIONS = [
    # connect a new channel immediately, without the backoff of earlier channels
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
    ("grpc.enable_retries", 0),
    ("grpc.max_receive_message_length", -1),
]
# Environment variables that gRPC reads at startup. They suppress its message to stderr at each fork, and its log of
# errors, which this package reports.
QUIET = {"GRPC_ENABLE_FORK_SUPPORT": "0", "GRPC_VERBOSITY": "NONE"}


NOBODY_THERE = "connection refused"


class Unavailable(ElasticError):
    """Error raised when etcd does not respond. It may nevertheless have performed the request."""


class AccessDenied(Unavailable):
    """Error raised when etcd denies access. At startup, it is reported to the user. Later, the request is retried."""


class Rejected(ElasticError):
    """Error raised when etcd rejects a request. A retry would be rejected as well."""


class LeaseExpired(Rejected):
    """Error raised when a lease has expired or never existed."""


def load() -> Any:
    """Return the module ``aetcd.rpc`` with messages and stubs. Raises Invalid if the extra is not installed."""
    before = {name: os.environ.get(name) for name in QUIET}
    os.environ.update({name: text for name, text in QUIET.items() if before[name] is None})
    try:
        import grpc.aio
        from aetcd import rpc

        grpc.aio.init_grpc_aio()
    except ImportError as error:
        raise Invalid(
            f"etcd can't be used, because the package {error.name} is not installed: run pip install"
            " 'hvd-elastic[etcd]'"
        ) from None
    finally:  # Restore the environment, because workers must not inherit these variables.
        for name, text in before.items():
            if text is None:
                os.environ.pop(name, None)
    return rpc


class EtcdConnection:
    """Connection to one member of etcd, which is opened by the first call.

    Attributes:
        closed: whether this process has closed the connection. Every pending call then raises Unavailable.
    """

    def __init__(self, endpoint: str, access: EtcdAccess) -> None:
        self.endpoint = endpoint
        self.closed = False
        self._access = access
        self._rpc = rpc = load()
        self._channel = _channel(rpc, endpoint, access)
        self.kv = rpc.KVStub(self._channel)
        self.lease = rpc.LeaseStub(self._channel)
        self.watches = rpc.WatchStub(self._channel)
        self._auth = rpc.AuthStub(self._channel)
        self._token = ""

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        return (("token", self._token),) if self._token else ()

    async def log_in(self, within_s: float) -> None:
        """Request a token from etcd if a user is configured.

        Raises:
            Unavailable: etcd did not respond within the limit.
            AccessDenied: etcd rejected the user or the password.
        """
        if not self._access.user:
            return
        request = self._rpc.AuthenticateRequest(
            name=self._access.user, password=self._access.password
        )
        try:
            answer = await self.outcome(self._auth.Authenticate(request, timeout=within_s))
        except Rejected as error:
            if "authentication is not enabled" in str(error):
                return  # no token is needed, because access control is disabled
            raise AccessDenied(
                f"etcd rejected user {self._access.user!r}: {error}. Check --etcd-user and the password"
            ) from None
        self._token = answer.token

    async def call(
        self, method: Callable[..., Awaitable[Any]], request: Any, within_s: float
    ) -> Any:
        """Send a request and return the answer. Raises Unavailable if none arrives within ``within_s`` seconds."""
        return await self.outcome(method(request, timeout=within_s, metadata=self.metadata or None))

    async def outcome(self, call: Awaitable[Answer], within_s: float | None = None) -> Answer:
        """Await a call, and convert gRPC's errors to Unavailable and Rejected."""
        task = asyncio.ensure_future(call)
        # Run the call in a separate task: closing the channel cancels the call, which must not look like a cancellation
        # of the caller.
        try:
            done, _ = await asyncio.wait({task}, timeout=within_s)
        except asyncio.CancelledError:
            _forget(task)
            raise
        if not done:
            _forget(task)
            raise Unavailable(
                f"etcd did not respond within {within_s:g} s: check its load and the network"
            )
        if task.cancelled():
            raise Unavailable("the connection to etcd was closed: see its log")
        error = task.exception()
        if error is None:
            return task.result()
        if isinstance(error, self._rpc.AioRpcError):
            raise self._translated(error) from None
        if self.closed and isinstance(error, Exception):
            raise Unavailable("the connection to etcd was closed: see its log") from None
        raise error

    async def close(self) -> None:
        if not self.closed:
            self.closed = True
            await self._channel.close()

    def _translated(self, error: Any) -> ElasticError:
        codes, code = self._rpc.StatusCode, error.code()
        details = str(error.details() or code.name)
        text = details.removeprefix("etcdserver: ")
        if code is codes.UNAUTHENTICATED or "revision of auth store is old" in details:
            # the token has expired, so reconnect to request a new one
            return Unavailable(text)
        if "user name is empty" in details:
            return AccessDenied("it requires a user: pass --etcd-user and its password")
        if code is codes.NOT_FOUND and "lease not found" in details:
            return LeaseExpired(text)
        if code is codes.RESOURCE_EXHAUSTED and "larger than max" in details:
            return Rejected(text)
        if code is codes.DEADLINE_EXCEEDED:
            return Unavailable("no response in time")
        if code in _rejections(codes):
            return Rejected(text)
        return _trouble(details, self._access)


def _rejections(codes: Any) -> tuple[Any, ...]:
    return (
        codes.PERMISSION_DENIED,
        codes.INVALID_ARGUMENT,
        codes.FAILED_PRECONDITION,
        codes.ALREADY_EXISTS,
        codes.NOT_FOUND,
        codes.OUT_OF_RANGE,
        codes.UNIMPLEMENTED,
    )


def _trouble(details: str, access: EtcdAccess) -> Unavailable:
    tls = access.tls
    if "Connection refused" in details:
        return Unavailable(NOBODY_THERE)
    if "DNS" in details or "resolution" in details:
        return Unavailable("its name can't be resolved")
    if tls and "CERTIFICATE_VERIFY_FAILED" in details:
        return AccessDenied(f"its certificate is not signed by {tls.ca}; check --etcd-ca")
    if tls and "not in peer certificate" in details:
        return AccessDenied(
            "its certificate is for another name: use a host name that the certificate contains"
        )
    if tls and "WRONG_VERSION" in details:
        return AccessDenied("it does not use TLS: omit --etcd-ca, or enable TLS there")
    if tls and "Unwrap failed" in details:
        return AccessDenied("it rejects the client certificate: check --etcd-cert and --etcd-key")
    if tls and "handshake" in details.lower():
        return Unavailable("the TLS handshake failed: check --etcd-cert, and whether etcd uses TLS")
    if "Socket closed" in details or "reset" in details or "Broken pipe" in details:
        wants = "a client certificate (--etcd-cert and --etcd-key)" if tls else "TLS (--etcd-ca)"
        return Unavailable(f"it closed the connection; it may require {wants}")
    return Unavailable(details.removeprefix("etcdserver: "))


def _channel(rpc: Any, endpoint: str, access: EtcdAccess) -> Any:
    if access.tls is None:
        return rpc.insecure_channel(endpoint, options=OPTIONS)
    import grpc

    try:
        credentials = grpc.ssl_channel_credentials(
            root_certificates=_content(access.tls.ca, "--etcd-ca"),
            private_key=_content(access.tls.key, "--etcd-key") if access.tls.key else None,
            certificate_chain=_content(access.tls.cert, "--etcd-cert") if access.tls.cert else None,
        )
    except OSError as error:
        raise AccessDenied(
            f"{error.filename} can't be read: {error.strerror}. Pass a readable PEM file"
        ) from None
    return rpc.secure_channel(endpoint, credentials, options=OPTIONS)


def _content(path: str, flag: str) -> bytes | None:
    """Return the content of a file, or None without a path.

    Called for each connection, so that renewed certificates take effect.
    """
    if not path:
        return None
    with open(path, "rb") as file:
        content = file.read()
    if b"-----BEGIN" not in content:
        raise AccessDenied(f"{flag} {path} is not a PEM file: pass one that contains -----BEGIN")
    return content


def _forget(task: asyncio.Future[Any]) -> None:
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
    task.cancel()
