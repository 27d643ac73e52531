"""Bit flips in the memory of a worker, through its failpoints, and in files of checkpoints."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

from elastic.checkpoints import catalog
from elastic.checkpoints.files.manifest import CommitName, UnreadableCommit
from elastic.checkpoints.files.storage import Storage
from elastic.protocol.messages import Worker

RULES = "ELASTIC_FAILPOINTS"
# A flip after the reduction affects only this rank. Before the reduction, it would change the result on all ranks
# equally.
PLACES = {"weights": "commit", "moments": "commit", "gradients": "optimizer-step"}


@dataclass(frozen=True)
class CorruptedFile:
    """File of a checkpoint in which one bit was flipped."""

    checkpoint: CommitName
    file: str


class BitFlips:
    """Injector of bit flips in the memory of a job's workers and in its checkpoints."""

    def __init__(self, rules: Path, checkpoints: Storage, dice: random.Random) -> None:
        self._rules = rules
        self._checkpoints = checkpoints
        self._dice = dice
        self._armed: list[str] = []
        self._write()

    @property
    def environ(self) -> dict[str, str]:
        """Return the environment variables that the job needs for bit flips."""
        return {RULES: f"@{self._rules}"}

    def arm(self, what: str, worker: Worker, seed: int | None = None) -> None:
        """Make the worker flip a bit when it next reaches the failpoint. ``seed`` selects the bit (default: random)."""
        seed = self._dice.randrange(2**31) if seed is None else seed
        rule = f"{PLACES[what]} flip={what}:{seed} worker={worker}"
        self._armed.append(f"{rule} id=flip-{len(self._armed)}\n")
        self._write()

    def _write(self) -> None:
        new = self._rules.with_suffix(".new")
        new.write_text("".join(self._armed))
        new.rename(self._rules)

    def spoil(self) -> CorruptedFile | None:
        """Flip a random bit in a random file of the newest complete checkpoint.

        Returns:
            The checkpoint and the corrupted file, or None if no complete checkpoint exists.

        Raises:
            OSError: the checkpoint folder cannot be read, or the file cannot be read or written.
        """
        for name in reversed(catalog.names(self._checkpoints)):
            found = catalog.entry(self._checkpoints, name).manifest
            if found is not None:
                file = self._dice.choice([*found.files])
                path = Path(self._checkpoints.absolute, str(name), file)
                with path.open("r+b") as stream:
                    at = self._dice.randrange(path.stat().st_size)
                    stream.seek(at)
                    byte = stream.read(1)[0]
                    stream.seek(at)
                    stream.write(bytes([byte ^ 1 << self._dice.randrange(8)]))
                return CorruptedFile(name, file)
        return None

    def verdict(self, spoilt: CorruptedFile) -> str:
        """Return a sentence that states whether the corruption of the checkpoint was detected.

        Raises:
            OSError: the checkpoint cannot be read, for a reason other than the corruption.
        """
        name = spoilt.checkpoint
        try:
            found = catalog.read(self._checkpoints, name)
        except catalog.IncompleteCommit:
            return "its checkpoint was removed before it was read"
        except UnreadableCommit as error:
            return f"found: {error.trouble}"
        trouble = catalog.verify(self._checkpoints, found)
        return f"found: {trouble}" if trouble else "NOT FOUND: the checkpoint seems intact"
