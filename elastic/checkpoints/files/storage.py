"""A folder of checkpoints: on this machine, on a shared file system, or in an object store through fsspec.

A file that is written here appears whole or not at all: locally it is written next to its place, brought to the disk
and renamed; an object store shows an object when it is complete. Errors are OSError, whatever the store calls them.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import uuid
from collections.abc import Callable, Iterator
from typing import IO, Any, cast

import fsspec
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from elastic.checkpoints.files.checked import Alive, CheckedFile, DirectFile
from elastic.checkpoints.manifest import StoredFile
from elastic.collectives.shared_memory import native_library
from elastic.errors import Invalid

PROOF_BYTES = 4096  # a file without content can be made on a full disk
CONNECT_S, ANSWER_S = 4, 5  # of S3, for one attempt; it answers in less than a second


class Storage:
    """One folder. Names are relative to it, with ``/`` between folders. From any thread."""

    def __init__(self, url: str) -> None:
        """``url``: a path, or what fsspec knows: ``s3://bucket/folder``, ``gs://``, ``az://``. Touches nothing.

        Raises Invalid if the package for the protocol is missing, or the protocol is unknown.
        """
        _refuse_misspelt(url)
        self.url = url.rstrip("/") or url
        protocol = url.partition("://")[0] if "://" in url else "file"
        try:
            fs, self._root = url_to_fs(self.url, **_patience(protocol))
        except ImportError as error:
            raise Invalid(
                f"{url}: {protocol}:// needs a package that is not installed ({error}); install it on every host"
            ) from error
        except ValueError as error:
            known = ", ".join(
                sorted({"file", "s3", "gs", "az"} & set(fsspec.available_protocols()))
            )
            raise Invalid(
                f"{url}: {error}; give a folder, or a URL of a protocol that fsspec knows ({known}, ...)"
            ) from error
        self._fs: Any = fs
        loop = getattr(fs, "loop", None)
        if loop is not None and loop.get_exception_handler() is None:
            loop.set_exception_handler(_retried_anyway)
        self.local = isinstance(fs, LocalFileSystem)
        self.outlives_us = not isinstance(fs, MemoryFileSystem)
        # Means the same from any working directory.
        self.absolute: str = self._root if self.local else self.url

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """What stores raise in words of their own becomes OSError."""
        try:
            yield
        except (OSError, Invalid):
            raise
        except Exception as error:  # botocore's and others' are no OSError
            raise OSError(f"{type(error).__name__}: {error}") from error

    @contextlib.contextmanager
    def writing(self, name: str, alive: Alive = lambda: None) -> Iterator[CheckedFile]:
        """A new file, which is there once the block has ended, and not at all if it raises. Raises OSError, and what
        ``alive`` does, which is called now and then.
        """
        path = self._path(name)
        if not self.local:
            with self._errors():
                stream = self._fs.open(path, "wb")
            try:
                checked = CheckedFile(cast("IO[bytes]", _Stream(stream, self._errors)), alive)
                yield checked
                checked.complete()
            except BaseException:
                with contextlib.suppress(Exception):
                    stream.discard()
                stream.closed = True  # closing it would complete the upload
                raise
            with self._errors():
                stream.close()
            return
        os.makedirs(os.path.dirname(path), exist_ok=True)
        partial = f"{path}.{uuid.uuid4().hex[:8]}.tmp"
        try:
            with open(partial, "xb") as file, _checked(file, alive) as checked:
                yield checked
                checked.complete()
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(partial)
            raise
        _sync_folder(os.path.dirname(path))

    def write(self, name: str, content: bytes) -> StoredFile:
        """A small file, whole or not at all. Raises OSError."""
        with self.writing(name) as file:
            file.write(content)
        return file.stored()

    def claim(self, name: str, content: bytes) -> bool:
        """Makes a small file, if there is none of that name. Whether it was made. Raises OSError."""
        path = self._path(name)
        if self.local:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            try:
                with open(path, "xb") as file:
                    file.write(content)
            except FileExistsError:
                return False
            except OSError:
                with contextlib.suppress(OSError):
                    os.unlink(path)
                raise
            return True
        with self._errors():
            if self._fs.exists(path):
                return False
            self._fs.pipe_file(path, content)
            return True

    def read(self, name: str) -> bytes:
        """Raises FileNotFoundError, OSError."""
        with self._errors():
            content: bytes = self._fs.cat_file(self._path(name))
            return content

    def read_range(self, name: str, offset: int, length: int) -> bytes:
        """Fewer bytes where the file ends before. Raises FileNotFoundError, OSError."""
        with self._errors():
            content: bytes = self._fs.cat_file(self._path(name), offset, offset + length)
            return content

    @contextlib.contextmanager
    def reading(self, name: str) -> Iterator[IO[bytes]]:
        """Raises FileNotFoundError, OSError."""
        with self._errors():
            stream = self._fs.open(self._path(name), "rb")
        with contextlib.closing(stream):
            yield cast("IO[bytes]", _Stream(stream, self._errors))

    def sizes(self, folder: str = "") -> dict[str, int]:
        """Names and bytes of the files right in a folder; empty if there is no such folder. Raises OSError."""
        return {
            each["name"].rpartition("/")[2]: int(each["size"] or 0)
            for each in self._list(folder)
            if each["type"] == "file"
        }

    def exists(self) -> bool:
        """Whether anything has this name. An object store has no folder without objects. Raises OSError."""
        with self._errors():
            return bool(self._fs.exists(self._root))

    def folders(self) -> list[str]:
        """Names of the folders right here. Raises OSError."""
        return sorted(
            each["name"].rstrip("/").rpartition("/")[2]
            for each in self._list("")
            if each["type"] == "directory"
        )

    def _list(self, folder: str) -> list[dict[str, Any]]:
        with self._errors():
            self._fs.invalidate_cache()
            try:
                found: list[dict[str, Any]] = self._fs.ls(self._path(folder), detail=True)
            except FileNotFoundError:
                return []
            return found

    def remove_file(self, name: str) -> None:
        """Raises OSError unless it is gone already."""
        with self._errors(), contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(self._path(name))

    def remove_folder(self, name: str) -> None:
        """With all that is in it. Raises OSError unless it is gone already."""
        with self._errors(), contextlib.suppress(FileNotFoundError):
            self._fs.rm(self._path(name), recursive=True)

    def prove_writable(self) -> None:
        """Writes and removes a file. Raises Invalid with what went wrong."""
        name = f".writable-{uuid.uuid4().hex[:8]}"
        try:
            self.write(name, bytes(PROOF_BYTES))
            self.remove_file(name)
        except OSError as error:
            raise Invalid(f"nothing can be written to {self.url}: {error}") from error


@contextlib.contextmanager
def _checked(file: IO[bytes], alive: Alive) -> Iterator[CheckedFile]:
    library = native_library.load()
    if library is None:
        yield CheckedFile(file, alive)
        return
    with contextlib.closing(DirectFile(file, alive, library)) as direct:
        yield direct


class _Stream:
    """A stream to a store, whose errors are OSError."""

    def __init__(self, stream: Any, errors: Callable[[], contextlib.AbstractContextManager[None]]):
        self._stream = stream
        self._errors = errors

    def write(self, block: Any) -> int:
        with self._errors():
            return int(self._stream.write(block))

    def read(self, size: int) -> bytes:
        with self._errors():
            return bytes(self._stream.read(size))


def _refuse_misspelt(url: str) -> None:
    """``s3:/bucket`` would be a folder of that name here, and nothing at all the working directory. Raises Invalid."""
    if not url.strip():
        raise Invalid(
            "the folder of the checkpoints is empty, as where a shell's variable is not set; give a folder, or a URL"
        )
    protocol, colon, rest = url.partition(":")
    known = set(fsspec.available_protocols()) - {"file", "local"}  # these two may do without
    if colon and not rest.startswith("//") and protocol in known:
        raise Invalid(
            f"{url}: a URL has two slashes after its protocol: {protocol}://{rest.lstrip('/')};"
            f" for a folder of that name give ./{url}"
        )


def _patience(protocol: str) -> dict[str, Any]:
    """What S3 is opened with, unless fsspec's own configuration says something about it: nothing is waited for as long
    as the client would by itself. A server that hung is back for long then, and nobody has been told that it was away.
    """
    if protocol not in ("s3", "s3a") or fsspec.config.conf.get(protocol):
        return {}
    session = _s3_session()
    retries = {"total_max_attempts": 2, "mode": "standard"}
    timeouts = {"connect_timeout": CONNECT_S, "read_timeout": ANSWER_S, "retries": retries}
    return {} if session is None else {"session": session, "config_kwargs": timeouts}


@functools.cache
def _s3_session() -> Any:
    """One for the process; None without s3fs. Its requests do not ask whether the body may follow: the answer to that
    is the one thing that aiohttp waits for without a limit.
    """
    try:
        from aiobotocore.session import AioSession
    except ImportError:
        return None
    session = AioSession()
    session.register("before-call.s3", _send_at_once)
    return session


def _send_at_once(params: dict[str, Any], **_: object) -> None:
    params["headers"].pop("Expect", None)


def _retried_anyway(loop: Any, context: dict[str, Any]) -> None:
    """A connection that breaks leaves a task behind that nobody asks. What broke is raised where it was asked for."""
    logging.getLogger(__name__).debug("%s: %r", context.get("message"), context.get("exception"))


def _sync_folder(path: str) -> None:
    """The new name is on the disk too."""
    number = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
