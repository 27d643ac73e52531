"""Folder of checkpoints on this machine, on a shared file system, or in an object store through fsspec.

Files are created atomically: a local file is written under a temporary name, synced to disk and renamed; an object in
an object store becomes visible once the upload is complete. All errors of the store are raised as OSError.
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

from elastic.checkpoints.files.checksummed_file import Alive, CheckedFile, DirectFile
from elastic.checkpoints.files.manifest import StoredFile
from elastic.collectives.shared_memory import native_library
from elastic.errors import Invalid

# The test file is not empty, because an empty file can be created on a full disk.
PROOF_BYTES = 4096
# Timeouts of one request in seconds. S3 normally responds in less than a second.
CONNECT_S, ANSWER_S = 4, 5


class Storage:
    """Folder of checkpoints. Names are relative to the folder and separated by ``/``. Thread-safe."""

    def __init__(self, url: str) -> None:
        """Open the folder without accessing it.

        Args:
            url: a path, or a URL that fsspec supports: ``s3://bucket/folder``, ``gs://``, ``az://``.

        Raises:
            Invalid: the protocol is unknown, or its package is missing.
        """
        _refuse_misspelt(url)
        self.url = url.rstrip("/") or url
        protocol = url.partition("://")[0] if "://" in url else "file"
        try:
            fs, self._root = url_to_fs(self.url, **_patience(protocol))
        except ImportError as error:
            raise Invalid(
                f"{url} can't be used, because {protocol}:// needs a package that is not installed ({error}):"
                " install the package on every host"
            ) from error
        except ValueError as error:
            known = ", ".join(
                sorted({"file", "s3", "gs", "az"} & set(fsspec.available_protocols()))
            )
            raise Invalid(
                f"{url} can't be used: {error}. Pass a folder, or a URL with a protocol that fsspec supports"
                f" ({known}, ...)"
            ) from error
        self._fs: Any = fs
        loop = getattr(fs, "loop", None)
        if loop is not None and loop.get_exception_handler() is None:
            loop.set_exception_handler(_retried_anyway)
        self.local = isinstance(fs, LocalFileSystem)
        self.outlives_us = not isinstance(fs, MemoryFileSystem)
        # Absolute, so that a later change of the working directory has no effect.
        self.absolute: str = self._root if self.local else self.url

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except (OSError, Invalid):
            raise
        except Exception as error:  # Exceptions of botocore and other packages are not OSErrors.
            raise OSError(f"{type(error).__name__}: {error}") from error

    @contextlib.contextmanager
    def writing(self, name: str, alive: Alive = lambda: None) -> Iterator[CheckedFile]:
        """Context manager that writes a new file, visible once the block ends. If the block raises, no file is created.

        Args:
            name: name of the file.
            alive: called regularly. Raises an exception to abort the write.

        Raises:
            OSError: the storage failed.
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
                stream.closed = True  # Not `close`, which would complete the upload.
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
        """Write a small file atomically.

        Raises:
            OSError: the storage failed.
        """
        with self.writing(name) as file:
            file.write(content)
        return file.stored()

    def claim(self, name: str, content: bytes) -> bool:
        """Create a small file unless a file of this name exists. Return whether the file was created.

        Raises:
            OSError: the storage failed.
        """
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
        """Return the content of a file.

        Raises:
            FileNotFoundError: the file does not exist.
            OSError: the storage failed.
        """
        with self._errors():
            content: bytes = self._fs.cat_file(self._path(name))
            return content

    def read_range(self, name: str, offset: int, length: int) -> bytes:
        """Return ``length`` bytes starting at ``offset``, or fewer if the file is shorter.

        Raises:
            FileNotFoundError: the file does not exist.
            OSError: the storage failed.
        """
        with self._errors():
            content: bytes = self._fs.cat_file(self._path(name), offset, offset + length)
            return content

    @contextlib.contextmanager
    def reading(self, name: str) -> Iterator[IO[bytes]]:
        """Context manager that opens a file for reading and closes it.

        Raises:
            FileNotFoundError: the file does not exist.
            OSError: the storage failed.
        """
        with self._errors():
            stream = self._fs.open(self._path(name), "rb")
        with contextlib.closing(stream):
            yield cast("IO[bytes]", _Stream(stream, self._errors))

    def sizes(self, folder: str = "") -> dict[str, int]:
        """Return the sizes in bytes of the files directly in a folder, by name.

        The result is empty if the folder does not exist.

        Raises:
            OSError: the storage failed.
        """
        return {
            each["name"].rpartition("/")[2]: int(each["size"] or 0)
            for each in self._list(folder)
            if each["type"] == "file"
        }

    def exists(self) -> bool:
        """Return whether the folder exists. In an object store, a folder exists only if it contains objects.

        Raises:
            OSError: the storage failed.
        """
        with self._errors():
            return bool(self._fs.exists(self._root))

    def folders(self) -> list[str]:
        """Return the names of the direct subfolders.

        Raises:
            OSError: the storage failed.
        """
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
        """Remove a file, if it exists.

        Raises:
            OSError: the storage failed.
        """
        with self._errors(), contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(self._path(name))

    def remove_folder(self, name: str) -> None:
        """Remove a folder with its contents, if the folder exists.

        Raises:
            OSError: the storage failed.
        """
        with self._errors(), contextlib.suppress(FileNotFoundError):
            self._fs.rm(self._path(name), recursive=True)

    def prove_writable(self) -> None:
        """Check that files can be created and removed. Raise Invalid with the cause if not."""
        name = f".writable-{uuid.uuid4().hex[:8]}"
        try:
            self.write(name, bytes(PROOF_BYTES))
            self.remove_file(name)
        except (FileExistsError, NotADirectoryError) as error:
            raise Invalid(
                f"{self.url} or one of its parents is a file: pass a folder or URL"
            ) from error
        except OSError as error:
            # the reason given by the operating system, without errno and path
            why = error.strerror or error
            raise Invalid(
                f"{self.url} is not writable: {why}. Pass another folder or URL"
            ) from error


@contextlib.contextmanager
def _checked(file: IO[bytes], alive: Alive) -> Iterator[CheckedFile]:
    library = native_library.load()
    if library is None:
        yield CheckedFile(file, alive)
        return
    with contextlib.closing(DirectFile(file, alive, library)) as direct:
        yield direct


class _Stream:
    """Stream to or from a storage that converts the store's exceptions to OSError."""

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
    """Raise Invalid if a URL is empty or misspelled.

    A misspelled URL such as ``s3:/bucket`` would otherwise be used as a local path.
    """
    if not url.strip():
        raise Invalid(
            "the name of the checkpoint folder is empty. A shell variable may be unset. Pass a folder or a URL"
        )
    protocol, colon, rest = url.partition(":")
    # fsspec accepts these protocols without ``//``.
    known = set(fsspec.available_protocols()) - {"file", "local"}
    if colon and not rest.startswith("//") and protocol in known:
        raise Invalid(
            f"{url} is not a valid URL: write two slashes after the protocol ({protocol}://{rest.lstrip('/')}),"
            f" or pass ./{url} for a folder of this name"
        )


def _patience(protocol: str) -> dict[str, Any]:
    """Return fsspec options with timeouts for S3.

    The result is empty for other protocols, and if the user has configured fsspec for S3.

    With the S3 client's default timeouts, an outage would be reported only after minutes.
    """
    if protocol not in ("s3", "s3a") or fsspec.config.conf.get(protocol):
        return {}
    session = _s3_session()
    retries = {"total_max_attempts": 2, "mode": "standard"}
    timeouts = {"connect_timeout": CONNECT_S, "read_timeout": ANSWER_S, "retries": retries}
    return {} if session is None else {"session": session, "config_kwargs": timeouts}


@functools.cache
def _s3_session() -> Any:
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
    """Log the error of a background task at level debug only, because the failed request raises the same error."""
    logging.getLogger(__name__).debug("%s: %r", context.get("message"), context.get("exception"))


def _sync_folder(path: str) -> None:
    """Sync a folder to disk, so that the names of new files in it are durable."""
    number = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
