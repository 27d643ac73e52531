"""Bits that change where nobody has written: in the memory of a worker, by a rule for its failpoints, and in a file of
a checkpoint. Decides nothing.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

from elastic.checkpoints import catalog
from elastic.checkpoints.files.storage import Storage
from elastic.checkpoints.manifest import Name, NotReadable
from elastic.protocol.messages import Worker

RULES = "ELASTIC_FAILPOINTS"
# A gradient that all ranks have added up counts until the step; what is flipped earlier reaches all of them alike.
PLACES = {"weights": "commit", "moments": "commit", "gradients": "optimizer-step"}


@dataclass(frozen=True)
class Spoilt:
    """A file of a checkpoint, one bit of which is another one now."""

    checkpoint: Name
    file: str


class BitFlips:
    """Of one job. ``rules``: a file of its own; ``checkpoints``: the folder that the job writes to, on this machine."""

    def __init__(self, rules: Path, checkpoints: Storage, dice: random.Random) -> None:
        self._rules = rules
        self._checkpoints = checkpoints
        self._dice = dice
        self._armed: list[str] = []
        self._write()

    @property
    def environ(self) -> dict[str, str]:
        """For the job."""
        return {RULES: f"@{self._rules}"}

    def arm(self, what: str, worker: Worker, seed: int | None = None) -> None:
        """The worker does it to itself when it comes to that place. ``seed``: of which bit; None: any."""
        seed = self._dice.randrange(2**31) if seed is None else seed
        rule = f"{PLACES[what]} flip={what}:{seed} worker={worker}"
        self._armed.append(f"{rule} id=flip-{len(self._armed)}\n")
        self._write()

    def _write(self) -> None:
        new = self._rules.with_suffix(".new")
        new.write_text("".join(self._armed))
        new.rename(self._rules)

    def spoil(self) -> Spoilt | None:
        """A bit of a file of the newest whole checkpoint. None: there is none. Raises OSError."""
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
                return Spoilt(name, file)
        return None

    def verdict(self, spoilt: Spoilt) -> str:
        """What is said of the checkpoint now. Raises OSError."""
        name = spoilt.checkpoint
        try:
            found = catalog.read(self._checkpoints, name)
        except catalog.Torn:
            return "its checkpoint was removed before anybody read it"
        except NotReadable as error:
            return f"found: {error}"
        trouble = catalog.verify(self._checkpoints, found)
        return f"found: {trouble}" if trouble else "NOT FOUND: the checkpoint seems whole"
