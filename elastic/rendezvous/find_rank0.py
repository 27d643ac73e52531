"""Rendezvous of a world without a driver: rank 0 serves a store and publishes its address.

The launcher determines how the address is published: see `launcher_detection`. All ranks exchange their hosts and local
ranks through this store. From these they compute their places, and the address of the first world's own store.
"""

from __future__ import annotations

import contextlib
import dataclasses
import ipaddress
import os
import secrets
import socket
import stat
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec

from elastic.errors import CollectiveFailed, Invalid
from elastic.protocol import messages
from elastic.protocol.messages import Address, Place
from elastic.rendezvous import launcher_detection
from elastic.rendezvous.launcher_detection import (
    ByAddress,
    ByFile,
    ByStore,
    ByTorchelasticStore,
    LauncherEnv,
)
from elastic.rendezvous.store import Store, listen
from elastic.rendezvous.worker_settings import Environment

REACH_S = 0.5  # timeout in seconds for connecting to rank 0 at an address that may be out of date
LOOK_S = 0.02  # seconds between attempts to read rank 0's address
# IPv4 and IPv6 destinations for looking up a route; no data is sent to them
_PUBLIC = ("192.0.2.1", "2001:db8::1")


class Arrival(msgspec.Struct, frozen=True, array_like=True):
    """Message that a rank sends to all other ranks in the rendezvous.

    Args:
        store: address at which this rank, if it is rank 0, will serve the next world's store.
    """

    host: str
    local_rank: int | None
    store: Address | None


class Rank0Endpoint(msgspec.Struct, frozen=True, array_like=True):
    """Address and secret that rank 0 publishes for the other ranks."""

    host: str
    port: int
    secret: bytes


class FoundRank0(NamedTuple):
    """Result of the search for rank 0: the completed ``env``, and the ``store`` of the rendezvous.

    Close the store once the world is formed.
    """

    env: Environment
    store: Store


class _Publisher(Protocol):
    def publish(self, endpoint: Rank0Endpoint) -> None: ...

    def lookup(self, deadline: float) -> Rank0Endpoint | None: ...

    def clear(self) -> None: ...


def meet(started: LauncherEnv, env: Environment) -> FoundRank0:
    """Find rank 0 and connect to its store. This function blocks until rank 0 can be reached.

    Raises:
        Invalid: a port or a folder cannot be used.
        CollectiveFailed: rank 0 was not reached within ``env.start_timeout_s`` seconds.
    """
    way = started.way
    assert way is not None, "a world of one has no rendezvous"
    deadline = time.monotonic() + env.start_timeout_s
    bind_host = env.bind_host or _bind_host(way)
    if isinstance(way, ByAddress):
        address = Address(bind_host if started.rank == 0 else numeric(way.host), way.port)
        secret = way.secret
        # The address is known in advance, so it can't be out of date. If a connection fails, rank 0 has not started
        # yet.
        store = (
            _serve(address, secret, way)
            if started.rank == 0
            else Store(address, None, env.start_timeout_s, secret=secret)
        )
        _greet(store, started, env, deadline)
        found = _found(env, bind_host, secret, started)
        return FoundRank0(found, store)
    board = _board(way, deadline)
    if started.rank == 0:
        secret = secrets.token_bytes(32)
        store = _serve(Address(bind_host, 0), secret, way)
        board.publish(Rank0Endpoint(store.address.host, store.address.port, secret))
        try:
            _greet(store, started, env, deadline)
        finally:
            board.clear()
        return FoundRank0(_found(env, bind_host, secret, started), store)
    while True:
        left = board.lookup(deadline)
        if left is None:
            raise CollectiveFailed(_nobody(started, env.start_timeout_s))
        store = Store(Address(left.host, left.port), None, REACH_S, secret=left.secret)
        try:
            _greet(store, started, env, deadline)
            return FoundRank0(_found(env, bind_host, left.secret, started), store)
        except CollectiveFailed:
            # The address may be left over from an earlier job, because this job's rank 0 has not published its own yet.
            store.close()
            if time.monotonic() > deadline:
                raise
            time.sleep(LOOK_S)


def arrive(
    store: Store,
    rank: int,
    size: int,
    local_rank: int | None,
    mine: Address | None,
    timeout_s: float,
) -> tuple[Place, Address]:
    """Wait until all ranks have arrived. Return this rank's place and the address of the next world's store.

    Args:
        store: store of the rendezvous.
        rank: rank of this process.
        size: number of ranks.
        local_rank: local rank that the launcher assigned, or None if unknown.
        mine: address at which this rank, if it is rank 0, will serve the next world's store.
        timeout_s: timeout in seconds.

    Raises:
        CollectiveFailed: a rank did not arrive within ``timeout_s``, or the store does not respond.
    """
    arrival = msgspec.msgpack.encode(Arrival(socket.gethostname(), local_rank, mine))
    blobs = store.exchange("arrivals", rank, size, arrival, timeout_s)
    arrivals = [msgspec.msgpack.decode(blob, type=Arrival) for blob in blobs]
    address = arrivals[0].store
    assert address is not None, "rank 0 sends the address of its store"
    hosts = [each.host for each in arrivals]
    return launcher_detection.place(rank, hosts, [each.local_rank for each in arrivals]), address


def _greet(store: Store, started: LauncherEnv, env: Environment, deadline: float) -> None:
    """Exchange a message with all ranks, to verify that all of them belong to the same job."""
    left_s = max(deadline - time.monotonic(), 0.001)
    try:
        store.exchange("greetings", started.rank, started.size, b"", left_s)
    except CollectiveFailed as error:
        if time.monotonic() < deadline:
            raise
        raise CollectiveFailed(f"{_nobody(started, env.start_timeout_s)}: {error}") from error


def _nobody(started: LauncherEnv, limit_s: float) -> str:
    return (
        f"not all {started.size} ranks that {started.by} announces called init() within {limit_s:g} s; rank"
        f" {started.rank} did. Set HOROVOD_START_TIMEOUT to wait longer, or unset the variables of the launcher to"
        " train alone"
    )


def _found(env: Environment, bind_host: str, secret: bytes, started: LauncherEnv) -> Environment:
    worker = messages.Worker(socket.gethostname(), started.local_rank or 0, 1)
    return dataclasses.replace(env, bind_host=bind_host, secret=secret, worker=worker)


def _serve(address: Address, secret: bytes, way: object) -> Store:
    try:
        listener = listen(address.host, address.port)
    except OSError as error:
        raise Invalid(
            f"rank 0 can't listen on {address.host} port {address.port}: {error.strerror}. Set"
            f" {launcher_detection.ASKS_FOR_PORT} to another port on all ranks, or set ELASTIC_BIND to another address"
            " of this host"
        ) from None
    store = Store(listener.address, listener, REACH_S, secret=secret)
    store.open()
    return store


# ---- ways to publish ---------------------------------------------------------------------------------------------


def _board(way: ByTorchelasticStore | ByFile | ByStore, deadline: float) -> _Publisher:
    if isinstance(way, ByFile):
        return _File(way)
    if isinstance(way, ByStore):
        return _TorchStore(way.store, "hvd-elastic/rank0")
    from torch._C import _distributed_c10d as c10d

    agents = c10d.TCPStore(
        way.host,
        way.port,
        is_master=False,
        timeout=timedelta(seconds=max(deadline - time.monotonic(), 1.0)),
        wait_for_workers=False,
    )
    return _TorchStore(agents, f"{way.prefix}/rank0")


class _TorchStore:
    """Rendezvous in which rank 0 publishes its endpoint in a torch.distributed store.

    The store is that of torchrun's agent, or one that all ranks share.
    """

    def __init__(self, store: Any, key: str) -> None:
        self._store = store
        self._key = key

    def publish(self, endpoint: Rank0Endpoint) -> None:
        self._store.set(self._key, msgspec.msgpack.encode(endpoint).hex())

    def lookup(self, deadline: float) -> Rank0Endpoint | None:
        try:
            self._store.wait([self._key], timedelta(seconds=max(deadline - time.monotonic(), 0.01)))
            return msgspec.msgpack.decode(
                bytes.fromhex(self._store.get(self._key).decode()), type=Rank0Endpoint
            )
        except RuntimeError:  # DistStoreError: the key was not published in time
            return None

    def clear(self) -> None:
        """Do nothing, because the next rank 0 overwrites the value."""


class _File:
    """Rendezvous in which rank 0 publishes its endpoint in a file. Only this user can access the file's folder."""

    def __init__(self, way: ByFile) -> None:
        self._path = private_folder() / way.name

    def publish(self, endpoint: Rank0Endpoint) -> None:
        """Write the endpoint to the file atomically, because other ranks may read the file at any time."""
        handle, name = tempfile.mkstemp(dir=self._path.parent, prefix=f"{self._path.name}.")
        with os.fdopen(handle, "wb") as file:  # created with mode 0600
            file.write(msgspec.msgpack.encode(endpoint))
        os.replace(name, self._path)

    def lookup(self, deadline: float) -> Rank0Endpoint | None:
        while time.monotonic() < deadline:
            try:
                return msgspec.msgpack.decode(self._path.read_bytes(), type=Rank0Endpoint)
            except FileNotFoundError:
                time.sleep(LOOK_S)
        return None

    def clear(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._path.unlink()


def private_folder() -> Path:
    """Return the folder for endpoint files. This function creates it with mode 0700 if necessary.

    Raises:
        Invalid: another user can read or write the folder.
    """
    path = Path(tempfile.gettempdir()) / f"hvd-elastic-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise Invalid(
            f"the folder {path} must belong to this user and have mode 0700, because the ranks of this host"
            " connect through it: remove the folder, or set TMPDIR to your own folder on all ranks"
        )
    return path


# ---- addresses ---------------------------------------------------------------------------------------------------


def _bind_host(way: ByAddress | ByTorchelasticStore | ByFile | ByStore) -> str:
    """Return this host's address on the route to rank 0, the only address on which the rank will listen."""
    if isinstance(way, ByFile) or not way.host:
        return "127.0.0.1"
    to = numeric(way.host)
    return own_address(to) or to


def numeric(host: str) -> str:
    """Resolve MASTER_ADDR to a numeric address.

    If this host resolves its own name to a loopback address, as on Debian, return its network address instead, which
    other hosts can reach. Raises Invalid if ``host`` cannot be resolved.
    """
    try:
        rows = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise Invalid(
            f"MASTER_ADDR {host!r} can't be resolved: {error.strerror}. Check the spelling and DNS, or set"
            " MASTER_ADDR to an IP address"
        ) from None
    every = [str(row[4][0]) for row in rows]
    # The name may have both IPv4 and IPv6 addresses, but this host may have a route to only one of them.
    found = next((each for each in every if own_address(each) is not None), every[0])
    if host == "localhost" or not _loopback(found) or _is_numeric(host):
        return found
    for public in _PUBLIC:
        own = own_address(public)
        if own is not None and not _loopback(own):
            return own
    return found


def own_address(towards: str) -> str | None:
    """Return this host's address on the route to a numeric address, or None without a route.

    This function sends no data.
    """
    family = socket.AF_INET6 if ":" in towards else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((towards, 9))
            return str(probe.getsockname()[0])
        except OSError:
            return None


def _loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def _is_numeric(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
