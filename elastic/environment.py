"""What a worker reads of its environment: the one place on the worker's side that does."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

from elastic.errors import Invalid
from elastic.protocol import Address, Worker

WAIT_TIMEOUT_S = 1260.0  # twice the default of --elastic-timeout, and a minute


@dataclass(frozen=True)
class Environment:
    """``driver`` is None outside ``elasticrun``: then the process is a world of one. ``_s`` are
    seconds.
    """

    driver: Address | None
    worker: Worker
    secret: bytes
    bind_host: str
    elastic: bool
    timeout_s: float  # to form a group
    collective_timeout_s: float  # for a collective to end
    wait_timeout_s: float  # for the driver's word, should it be frozen
    digest_commits: bool  # report a digest of every commit, so that replicas can be compared


def read(environ: Mapping[str, str] | None = None) -> Environment:
    """Raises Invalid where a variable that the launcher sets is damaged."""
    env = os.environ if environ is None else environ
    alone = Worker("localhost", 0, 1)
    timeout_s = _seconds(env, "HOROVOD_GLOO_TIMEOUT_SECONDS", 30.0)
    driver: Address | None = None
    worker, secret = alone, b""
    if "ELASTIC_DRIVER" in env:
        try:
            host, _, port = env["ELASTIC_DRIVER"].rpartition(":")
            driver = Address(host.strip("[]"), int(port))
            worker = Worker.parse(env["ELASTIC_WORKER"])
            secret = bytes.fromhex(env["ELASTIC_SECRET"])
        except (KeyError, ValueError) as error:
            raise Invalid(
                "ELASTIC_DRIVER is set, but ELASTIC_WORKER or ELASTIC_SECRET is missing or damaged:"
                " start the script with elasticrun, or unset ELASTIC_DRIVER"
            ) from error
    return Environment(
        driver=driver,
        worker=worker,
        secret=secret,
        bind_host=env.get("ELASTIC_BIND", "127.0.0.1"),
        elastic=env.get("HOROVOD_ELASTIC", "0") == "1",
        timeout_s=timeout_s,
        # Where the driver judges who is stuck, this is the last resort, and longer.
        collective_timeout_s=_seconds(env, "ELASTIC_COLLECTIVE_TIMEOUT", timeout_s),
        wait_timeout_s=_seconds(env, "ELASTIC_WAIT_TIMEOUT", WAIT_TIMEOUT_S),
        digest_commits=digests(env),
    )


def digests(environ: Mapping[str, str] | None = None) -> bool:
    """Whether workers report what they commit, so that a test can compare it."""
    env = os.environ if environ is None else environ
    return env.get("ELASTIC_DIGESTS", "0") == "1"


def record_nothing(environ: MutableMapping[str, str] | None = None) -> None:
    """Turns off torch's flight recorder, unless somebody asked for it by TORCH_FR_BUFFER_SIZE.

    It keeps the last 2000 collectives of the process with their Python stacks, and something of every group for ever:
    8 MB with three workers, in pieces between which other memory can't be given back. Read by torch when it makes its
    first group.
    """
    env = os.environ if environ is None else environ
    if "TORCH_NCCL_TRACE_BUFFER_SIZE" not in env:  # its older name
        env.setdefault("TORCH_FR_BUFFER_SIZE", "0")


def _seconds(env: Mapping[str, str], name: str, default: float) -> float:
    try:
        return float(env.get(name, default))
    except ValueError as error:
        raise Invalid(f"{name} is {env[name]!r}; give a number of seconds") from error


def failpoints(environ: Mapping[str, str] | None = None) -> str:
    """Rules of `elastic.failpoints`, not read yet. Empty: there are none."""
    env = os.environ if environ is None else environ
    return env.get("ELASTIC_FAILPOINTS", "").strip()


def worker(environ: Mapping[str, str] | None = None) -> Worker:
    """Who this process is, without looking at anything else that it was told."""
    env = os.environ if environ is None else environ
    try:
        return Worker.parse(env["ELASTIC_WORKER"])
    except (KeyError, ValueError):
        return Worker("localhost", 0, 1)
