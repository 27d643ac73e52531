"""Service through which a compute job and its training jobs exchange addresses, register workers and announce the end.

The service uses the authenticated frames of `elastic.rendezvous.store`, and answers only callers that have the key.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from elastic import context
from elastic.errors import CollectiveFailed, Invalid
from elastic.protocol.messages import Address
from elastic.rendezvous.find_rank0 import own_address
from elastic.rendezvous.store import Store, listen
from horovod.runner.common.util.timeout import TimeoutException

_SHAPE = "dispatchers, workers of each"
_END = "end"
_LEFT = "left"
_SERVE_S = 60.0  # timeout for a caller to send its request, in seconds
_LOOK_S = 30.0  # interval between two checks of whether the service still exists, in seconds

# Addresses and keys of the services that this process has shut down.
_ended: set[tuple[Address, bytes]] = set()

_Value = TypeVar("_Value")


class ComputeService:
    """Server on one rank of the compute job. It serves from its creation until `shutdown`.

    ``key`` authorizes callers. ``host`` is the numeric address to listen on. The default is the address of this
    job's workers, which requires ``hvd.init()``.

    Raises:
        Invalid: an argument is invalid.
        NotInitialized: ``host`` is not given and ``init()`` was not called.
        OSError: the server cannot listen on the address.
    """

    def __init__(
        self, dispatchers: int, workers_per_dispatcher: int, key: bytes, host: str | None = None
    ) -> None:
        shape = (dispatchers, workers_per_dispatcher)
        if min(shape) < 1:
            raise Invalid(
                f"dispatchers={dispatchers}, workers_per_dispatcher={workers_per_dispatcher}: pass at least 1 for"
                " both"
            )
        listener = listen(context.current().env.bind_host if host is None else host)
        self._address = listener.address
        self._store = Store(listener.address, listener, _SERVE_S, secret=key)
        self._store.provide(_SHAPE, lambda: [str(count).encode() for count in shape])
        self._store.open()

    def addresses(self) -> dict[str, list[tuple[str, int]]]:
        """Return the addresses of the service by host. Each address has a host and a port."""
        return {self._address.host: [(self._address.host, self._address.port)]}

    def shutdown(self) -> None:
        """Announce the end of the compute job to all waiting clients, and stop serving."""
        self._store.announce(_END, 0)
        self._store.close()


class ComputeClient:
    """Client of a compute service. Every method raises ConnectionError if the service cannot be reached.

    Methods that wait raise TimeoutException after ``timeout`` seconds. ``verbose`` has no effect.
    """

    def __init__(
        self,
        compute_addresses: Mapping[str, Sequence[tuple[str, int]]],
        key: bytes,
        verbose: int = 1,
        timeout: float = 60,
    ) -> None:
        (host, port), *_ = (each for listed in compute_addresses.values() for each in listed)
        self.address = Address(host, port)
        self._service = (self.address, key)
        self._timeout_s = timeout
        self._store = Store(self.address, None, timeout, secret=key)

    def own_host(self) -> str | None:
        """Return this host's numeric address on the route to the service, or None if there is no route."""
        return own_address(self.address.host)

    def register_dispatcher(self, dispatcher_id: int, dispatcher_address: str) -> None:
        """Register a dispatcher of this training job.

        Args:
            dispatcher_id: number of the dispatcher, from 0.
            dispatcher_address: address of the dispatcher, ``grpc://HOST:PORT``.

        Raises:
            IndexError: the compute job has no dispatcher with this number.
            Invalid: the dispatcher is already registered with another address.
        """
        self._known(dispatcher_id)
        mine = dispatcher_address.encode()
        first = self._call(lambda: self._store.announce(_dispatcher(dispatcher_id), 0, mine))
        if first != mine:
            raise Invalid(
                f"dispatcher {dispatcher_id} is already registered at {first.decode()}, not at"
                f" {dispatcher_address}, possibly by an earlier training job. A compute job serves the dispatchers of"
                " one training job: start a new compute job for each training job"
            )

    def wait_for_dispatcher_registration(self, dispatcher_id: int, timeout: float) -> str:
        """Wait until a dispatcher is registered, and return its address, ``grpc://HOST:PORT``.

        Args:
            dispatcher_id: number of the dispatcher, from 0.
            timeout: time limit, in seconds.

        Raises:
            IndexError: the compute job has no dispatcher with this number.
        """
        self._known(dispatcher_id)
        return self._receive(_dispatcher(dispatcher_id), timeout).decode()

    def register_worker_for_dispatcher(self, dispatcher_id: int, worker_id: int) -> None:
        """Register a worker with its dispatcher.

        Args:
            dispatcher_id: number of the dispatcher, from 0.
            worker_id: rank of the worker in the compute job.

        Raises:
            IndexError: the compute job has no dispatcher with this number.
        """
        self._known(dispatcher_id)
        self._call(lambda: self._store.announce(_worker(dispatcher_id, worker_id), 0))

    def wait_for_dispatcher_worker_registration(self, dispatcher_id: int, timeout: float) -> None:
        """Wait until all workers of a dispatcher are registered.

        If the compute job has only one dispatcher, it is used regardless of the ID.

        Args:
            dispatcher_id: number of the dispatcher, from 0.
            timeout: time limit for each worker, in seconds.

        Raises:
            IndexError: the compute job has no dispatcher with this number.
        """
        dispatchers, workers = self._shape()
        if dispatchers == 1:
            dispatcher_id = 0
        self._known(dispatcher_id)
        for worker_id in range(dispatcher_id * workers, (dispatcher_id + 1) * workers):
            self._receive(_worker(dispatcher_id, worker_id), timeout)

    def shutdown(self) -> None:
        """Request the end of the compute job. Must be called only when no training job needs its data any longer."""
        # done first, because the service may exit before its answer arrives
        _ended.add(self._service)
        self._call(lambda: self._store.announce(_END, 0))

    def look(self) -> None:
        """Check that the service exists. Raises ConnectionError if it does not."""
        self._shape()

    def wait_for_shutdown(self) -> None:
        """Wait until the end of the compute job is announced, without a time limit while the service exists.

        If this process has requested the end and the service can no longer be reached, the job is considered ended.
        """
        try:
            while True:
                try:
                    self._receive(_END, _LOOK_S)
                    return
                except TimeoutException:
                    self.look()
        except ConnectionError:
            if self._service not in _ended:
                raise

    def leave(self, worker_id: int) -> None:
        """Wait until all workers of all dispatchers have called this method after the end of the compute job.

        The service may then exit.
        """
        dispatchers, workers = self._shape()
        count = dispatchers * workers
        self._call(
            lambda: self._store.exchange(_LEFT, worker_id, count, b""),
            f"all {count} workers have stopped",
            self._timeout_s,
        )

    def _shape(self) -> tuple[int, int]:
        dispatchers, workers = self._call(lambda: self._store.fetch(_SHAPE, 0))
        return int(dispatchers), int(workers)

    def _known(self, dispatcher_id: int) -> None:
        dispatchers, _ = self._shape()
        if not 0 <= dispatcher_id < dispatchers:
            raise IndexError(
                f"dispatcher {dispatcher_id} does not exist: pass a number from 0 to {dispatchers - 1}"
            )

    def _receive(self, what: str, timeout: float) -> bytes:
        return self._call(
            lambda: self._store.listen_to(what, 0, timeout), f"{what} has registered", timeout
        )

    def _call(self, call: Callable[[], _Value], expected: str = "", limit_s: float = 0.0) -> _Value:
        try:
            return call()
        except CollectiveFailed as error:
            if expected and isinstance(error.__cause__, TimeoutError):
                raise TimeoutException(
                    f"timed out after {limit_s:g} s waiting at the compute service {self.address} until {expected}:"
                    " see the output of the compute job, or pass a longer --timeout to"
                    " horovod.tensorflow.data.compute_worker"
                ) from error
            raise ConnectionError(
                f"the compute service at {self.address} does not respond ({error.__cause__}). The compute job has"
                " ended, or its host is unreachable. Restart horovod.tensorflow.data.compute_worker; if it runs on"
                " another host, pass --network-interface with an interface that is reachable from this host"
            ) from error


def _dispatcher(dispatcher_id: int) -> str:
    return f"dispatcher {dispatcher_id}"


def _worker(dispatcher_id: int, worker_id: int) -> str:
    return f"worker {worker_id} of dispatcher {dispatcher_id}"


__all__ = ["ComputeClient", "ComputeService"]
