"""Results of a case so far: written to its file after each change, so that a crash or a hang hides nothing."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


class Skipped(Exception):
    """Nothing of the case can be tried here; the message says why."""


class Result:
    def __init__(self, path: Path) -> None:
        self._path = path
        self.figures: dict[str, Any] = {}
        self.left_out: dict[str, str] = {}  # a part of the case, and why
        self.ended: dict[str, Any] = {}
        self.write()

    def figure(self, name: str, value: Any) -> None:
        self.figures[name] = value
        self.write()

    def leave_out(self, part: str, reason: str) -> None:
        self.left_out[part] = reason
        self.write()

    def end(self, ok: bool | None, reason: str) -> None:
        """``ok`` None: skipped."""
        self.ended = {"ok": ok, "reason": reason}
        self.write()

    def write(self) -> None:
        new = self._path.with_suffix(".new")
        new.write_text(
            json.dumps({**self.ended, "figures": self.figures, "left_out": self.left_out})
        )
        os.replace(new, self._path)
