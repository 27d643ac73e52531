"""Functions for the secret of a job: 32 random bytes in a private file or in an environment variable.

Makes no decisions.

A process that knows the secret can act as the driver, an agent or a worker of the job. Error messages therefore contain
the location of the secret, never its value.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import stat
from collections.abc import Mapping

from elastic.errors import Invalid

FILE_VARIABLE = "ELASTIC_SECRET_FILE"
VARIABLE = "ELASTIC_JOB_SECRET"
SECRET_BYTES = 32
_READ_LIMIT = 4096  # maximum number of bytes read from a secret file
_HOW = "create one with `elasticrun secret FILE`"


def read_secret(file: str | None, environ: Mapping[str, str]) -> bytes | None:
    """Read the job's secret from ``file`` or, without a file, from the environment. Return None if neither is given.

    Raises:
        Invalid: the file cannot be read, the secret is malformed or too short, or two environment variables set it.
    """
    if file is not None:
        return _read(file, "--secret-file")
    named, given = environ.get(FILE_VARIABLE), environ.get(VARIABLE)
    if named and given:
        raise Invalid(f"{FILE_VARIABLE} and {VARIABLE} are both set: keep one of them")
    if named:
        return _read(named, FILE_VARIABLE)
    return _parsed(given, VARIABLE) if given else None


def make_secret_file(path: str) -> None:
    """Create a file with a new secret, accessible only to this user.

    Raises:
        Invalid: the file exists already or cannot be written.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        fd = os.open(path, flags, 0o600)
    except FileExistsError:
        raise Invalid(
            f"{path} already exists, and a job may use this secret: pass another name, or remove the file first"
        ) from None
    except (OSError, ValueError) as error:
        raise Invalid(f"{path} can't be created: {_why(error)}. Pass another path") from None
    try:
        with os.fdopen(fd, "w") as made:
            os.fchmod(fd, 0o600)  # A default ACL may have granted additional permissions.
            made.write(secrets.token_hex(SECRET_BYTES) + "\n")
    except OSError as error:
        os.unlink(path)
        raise Invalid(f"{path} can't be written: {_why(error)}. Pass another path") from None


def derived(secret: bytes, purpose: str) -> bytes:
    """Derive a key for one purpose from a secret.

    The key reveals neither the secret nor the keys for other purposes. Workers receive a derived key in their
    environment, which scripts often print and upload. That key does not authorize commands to agents.
    """
    return hmac.digest(secret, b"hvd-elastic key|" + purpose.encode(), hashlib.sha256)


def _read(path: str, source: str) -> bytes:
    try:
        # Opening a named pipe must not block.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with os.fdopen(fd, "rb") as file:
            about = os.fstat(fd)
            if not stat.S_ISREG(about.st_mode):
                raise Invalid(f"{source} {path} is not a regular file; {_HOW}")
            if about.st_uid not in (os.geteuid(), 0):
                raise Invalid(
                    f"{source} {path} belongs to another user, so it is not secret; {_HOW}"
                )
            if about.st_mode & 0o077 and not _of_a_pod(about):
                raise Invalid(
                    f"{source} {path} is accessible to other users (mode {about.st_mode & 511:03o}): run `chmod 600"
                    f" {path}`, and create a new secret if another user may have read it"
                )
            data = file.read(_READ_LIMIT)
    except (OSError, ValueError) as error:
        if isinstance(error, Invalid):
            raise
        raise Invalid(f"{source} {path} can't be read: {_why(error)}; {_HOW}") from None
    return _parsed(data.decode("ascii", errors="replace"), f"{source} {path}")


def _of_a_pod(about: os.stat_result) -> bool:
    """Return whether a file has the owner and mode of a Kubernetes Secret that is mounted into a non-root pod.

    Such a file is owned by root and readable by one group.
    """
    return about.st_uid == 0 and about.st_mode & 0o777 == 0o440


def _parsed(text: str, source: str) -> bytes:
    digits = text.strip()
    try:
        secret = bytes.fromhex(digits)
    except ValueError:
        secret = b""
    if len(secret) < SECRET_BYTES or len(digits) != 2 * len(secret):
        raise Invalid(
            f"{source} contains no secret of {2 * SECRET_BYTES} or more hexadecimal digits; {_HOW}"
        )
    return secret


def _why(error: OSError | ValueError) -> str:
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)
