"""Operator's client for a running job: finds the job's driver, authenticates, and sends requests.

All calls block, and have timeouts.
"""

from __future__ import annotations

import contextlib
import getpass
import itertools
import os
import pwd
import secrets
import socket
import ssl
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from elastic.driver.job.operator_api import messages
from elastic.driver.job.operator_api.messages import PURPOSE, OperatorAnswer, Request, Told
from elastic.driver.job.operator_api.runtime_folder import JobRecord, records
from elastic.driver.network.host_lists import parse_address
from elastic.driver.network.secret import derived
from elastic.errors import ElasticError, Invalid
from elastic.protocol.messages import Accepted, Challenge, ProtocolError, TurnedAway, encoded
from elastic.rpc.client import ConnectionClosed, ControlClient

CONNECT_S = 5.0
ANSWER_S = 20.0

_from_desk: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(
    Challenge | Accepted | TurnedAway | Told
)


class JobUnreachable(ElasticError):
    """Error raised when the driver of a job cannot be reached.

    Possible causes: the driver has exited, another driver has taken over, or the key belongs to another job.
    """


@dataclass(frozen=True)
class JobAddress:
    """Address of a job's operator service, and the key for authentication."""

    name: str
    address: str
    key: bytes = field(repr=False)
    tls: ssl.SSLContext | None = None


def find_job(wanted: str, environ: Mapping[str, str], *, journal: str | None = None) -> JobAddress:
    """Find a running job.

    Args:
        wanted: name of the job, path of its journal, or process ID of its driver. Empty means the only running job.
        environ: environment of this process.
        journal: path of the job's journal from ``--journal``, or None.

    Raises:
        Invalid: no job or several jobs match. The message lists the running jobs.
    """
    jobs = found = records(environ)
    which, owner, path, hint = "job of this user", "", "", ""
    called = [] if journal is not None else [each for each in jobs if each.name == wanted]
    if called:
        found = called
    elif journal is not None or (wanted and os.path.isfile(wanted)):
        path = os.path.abspath(journal or wanted)
        found = [record for record in jobs if record.journal == path]
        which, owner = f"job of this user whose journal is {path}", path
        hint = f" (if it has ended: elasticrun explain {path})"
    elif wanted:
        found = [each for each in jobs if wanted == str(each.pid)]
        which = f"job {wanted!r} of this user"
        if wanted.isdecimal():
            owner, path = f"process {wanted}", f"/proc/{wanted}"
    if not found:
        if other := _other_owner(path):
            raise Invalid(
                f"{owner} belongs to user {other}, and accepts commands only from this user: run the command as"
                f" {other}"
            )
        raise Invalid(f"no {which} runs on this machine{hint}; {_others(jobs)}")
    if len(found) > 1:
        raise Invalid(
            f"{len(found)} jobs run on this machine: pass the name of one of {_listed(found)}"
        )
    [record] = found
    return JobAddress(record.name, record.address, bytes.fromhex(record.key))


def _other_owner(path: str) -> str:
    try:
        uid = os.stat(path).st_uid
    except OSError:
        return ""
    return "" if uid == os.geteuid() else _name_of(uid)


def key_of(secret: bytes) -> bytes:
    """Derive the key that authenticates operators from the job's secret."""
    return derived(secret, PURPOSE)


def _others(jobs: Sequence[JobRecord]) -> str:
    if jobs:
        return f"pass one of the running jobs: {_listed(jobs)}"
    return "for a job whose driver runs on another machine, pass --etcd HOST:PORT, --job NAME and --secret-file FILE"


def _listed(listed: Sequence[JobRecord]) -> str:
    return ", ".join(f"{each.name} (process {each.pid})" for each in listed[:8])


def _unreachable(job: JobAddress, what: str, error: Exception, within_s: float) -> JobUnreachable:
    if isinstance(error, TimeoutError):
        what = f"did not answer within {within_s:g} s: check that its host is not overloaded, and retry"
    return JobUnreachable(f"the driver of job {job.name} {what}")


class JobClient:
    """Authenticated connection from an operator to a driver.

    Raises:
        JobUnreachable: the driver does not respond, or it rejects the key.
    """

    def __init__(self, job: JobAddress) -> None:
        self.job = job
        self._numbers = itertools.count(1)
        host, port = parse_address(job.address)
        try:
            sock = socket.create_connection((host, port), CONNECT_S)
        except OSError as error:
            raise JobUnreachable(
                f"the driver of job {job.name} does not respond at {job.address}: {error.strerror or error}."
                " The job may have ended: see elasticrun jobs"
            ) from None
        self._client = ControlClient(sock, _from_desk, job.tls)
        user = f"{_user()}@{socket.gethostname()}"
        # a random part, because the names of connections must be unique
        name = f"{user}:{os.getpid()}:{secrets.token_hex(4)}"
        try:
            self._client.authenticate(
                job.key,
                "operator",
                name,
                lambda nonce, proof: OperatorAnswer(name, nonce, proof),
                CONNECT_S,
            )
        except (OSError, ProtocolError) as error:
            raise _unreachable(
                job, f"rejected this command: {_worded(error)}", error, CONNECT_S
            ) from None

    def ask(self, kind: type[Any], *arguments: Any) -> Told:
        """Send a request of type ``kind`` to the driver, and return the answer.

        Raises:
            JobUnreachable: the connection failed, or no answer arrived within `ANSWER_S` seconds.
        """
        request: Request = kind(next(self._numbers), *arguments)
        try:
            self._client.send(encoded(request))
            deadline = time.monotonic() + ANSWER_S
            while True:
                reply = self._client.next(deadline)
                if isinstance(reply, Told) and reply.number == request.number:
                    return reply
        except (OSError, ProtocolError) as error:
            raise _unreachable(
                self.job,
                f"closed the connection: {_worded(error)}. The job may have ended: see elasticrun jobs",
                error,
                ANSWER_S,
            ) from None

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._client.socket.close()

    def __enter__(self) -> JobClient:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _worded(error: OSError | ProtocolError) -> str:
    hint = "; pass the --secret-file of this job"
    return f"{error}{hint if isinstance(error, ConnectionClosed) else ''}"


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


def _name_of(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:  # the user ID may have no name, as in a container
        return str(uid)


__all__ = ["JobAddress", "JobClient", "JobUnreachable", "find_job", "key_of", "messages"]
