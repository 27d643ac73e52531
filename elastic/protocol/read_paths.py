"""Record of the paths that a worker's script reads, from Python's audit events. Standard library only.

The audit hook is installed at interpreter start if the job has a checkpoint folder. See
`elastic.checkpoints.finished_training`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from types import FrameType
from typing import Any

DIR = "ELASTIC_CHECKPOINT_DIR"  # variable of the checkpoint folder, as in `checkpoints.options`
MOST = 5000  # maximum number of recorded paths
_OPENS = frozenset({"open", "sqlite3.connect"})
_LISTS = frozenset({"os.listdir", "os.scandir"})
# audit events of operations that may read files without further events
_LEAVES = frozenset(
    {
        *("subprocess.Popen", "os.system", "os.posix_spawn", "os.exec", "os.fork", "os.forkpty"),
        *("pty.spawn", "socket.connect", "socket.sendto", "socket.sendmsg", "ctypes.dlopen"),
    }
)
_EVENTS = _OPENS | _LISTS | _LEAVES
# modules that read files on behalf of their caller
_STANDARD = sys.stdlib_module_names | {"fsspec", "tenacity"}
_IMPORTS = ("_frozen_importlib_external", "importlib")
# modules of this package that read files on behalf of the script
_READERS = ("data", "integrations")
# packages whose compiled code opens files only through Python, apart from loading libraries
_KNOWN = frozenset(
    {
        *("elastic", "functorch", "horovod", "markupsafe", "msgspec", "numpy", "optree", "pandas"),
        *("PIL", "psutil", "scipy", "sklearn", "threadpoolctl", "torch", "yaml", "_yaml"),
    }
)


class ReadPaths:
    """Paths that one process has read.

    ``files`` and ``folders`` are absolute paths. ``unseen`` describes reads that could not be recorded.
    """

    def __init__(self) -> None:
        self.files: set[str] = set()
        self.folders: set[str] = set()
        self.unseen: set[str] = set()
        self._process = os.getpid()

    def hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Record the path of an audit event. See `sys.addaudithook`."""
        if event in _EVENTS and not self.unseen and os.getpid() == self._process:
            try:
                self._note(event, arguments)
            except Exception as error:  # An error of the recording must not fail the script's call.
                self.unseen.add(f"{event}: {type(error).__name__}")

    def _note(self, event: str, arguments: tuple[Any, ...]) -> None:
        hook = sys._getframe().f_back
        by = _caller(None if hook is None else hook.f_back)
        if by is None:
            return
        if event in _LEAVES:
            if event != "ctypes.dlopen" or by not in _KNOWN:
                self.unseen.add(f"{event} by {by or 'a thread'}")
            return
        path = arguments[0]
        if event in _OPENS:
            if isinstance(path, int) or (event == "open" and _writes(arguments)):
                return
            self.files.add(os.path.abspath(os.fsdecode(path)))
        elif isinstance(path, int):
            self.unseen.add(event)
        else:
            self.folders.add(os.path.abspath(os.fsdecode("." if path is None else path)))
        if len(self.files) + len(self.folders) > MOST:
            self.unseen.add(f"more than {MOST} files")


def _writes(arguments: tuple[Any, ...]) -> bool:
    """Return whether a file is opened only for writing."""
    flags = arguments[2] if len(arguments) > 2 else 0
    return isinstance(flags, int) and flags & os.O_ACCMODE == os.O_WRONLY


def _caller(frame: FrameType | None) -> str | None:
    """Return the package that reads a file. Frames of the standard library are skipped.

    Return None for imports, and for files that this package reads for its own use.
    """
    name = _name(frame)
    if name.partition(".")[0] in _IMPORTS:
        return None  # Not recorded here: `checkpoints.finished_training` reads the modules itself.
    while frame is not None and name.partition(".")[0] in _STANDARD:
        frame = frame.f_back
        name = _name(frame)
    root, _, rest = name.partition(".")
    ours = root in ("elastic", "horovod") and rest.partition(".")[0] not in _READERS
    return None if ours else root


def _name(frame: FrameType | None) -> str:
    return "" if frame is None else str(frame.f_globals.get("__name__", ""))


def compiled() -> set[str]:
    """Return the imported packages with compiled code, which may open files without an audit event."""
    found: set[str] = set()
    for name, module in [*sys.modules.items()]:
        file = getattr(module, "__file__", None)
        if isinstance(file, str) and file.endswith((".so", ".pyd")):
            # Some extension modules are not named after their package, so use the name of the folder.
            installed = file.replace("dist-packages", "site-packages").rpartition("site-packages/")
            root = (installed[2] if installed[1] else name.replace(".", "/")).partition("/")[0]
            if root.partition(".")[0] not in _KNOWN | _STANDARD:
                found.add(root)
    return found


_observed: ReadPaths | None = None


def observe(environ: Mapping[str, str]) -> None:
    """Start recording reads until the process exits, if the job has a checkpoint folder."""
    global _observed
    if environ.get(DIR) and _observed is None:
        _observed = ReadPaths()
        sys.addaudithook(_observed.hook)


def observed() -> ReadPaths | None:
    """Return the record, or None if this process was not observed from its start."""
    return _observed
