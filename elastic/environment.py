"""What a worker reads of its environment: the one place on the worker's side that does."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from elastic.errors import Invalid
from elastic.protocol import Address, Worker


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
    timeout_s: float
    digest_commits: bool  # report a digest of every commit, so that replicas can be compared


def read(environ: Mapping[str, str] | None = None) -> Environment:
    """Raises Invalid where a variable that the launcher sets is damaged."""
    env = os.environ if environ is None else environ
    alone = Worker("localhost", 0, 1)
    try:
        timeout_s = float(env.get("HOROVOD_GLOO_TIMEOUT_SECONDS", "30"))
    except ValueError as error:
        raise Invalid(
            "HOROVOD_GLOO_TIMEOUT_SECONDS is"
            f" {env['HOROVOD_GLOO_TIMEOUT_SECONDS']!r}; give a number of seconds"
        ) from error
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
        digest_commits=env.get("ELASTIC_DIGESTS", "0") == "1",
    )
