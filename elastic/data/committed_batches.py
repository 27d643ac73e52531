"""Progress of a loader, and the part of it that a commit counts. Pure: no I/O, no clock.

The loop first receives a batch, and then trains on it. Batches that loader workers have prefetched do not count. If an
optimizer steps between batches, its steps define the trained batches: a commit before the step, or in the middle of a
gradient accumulation, has the position of the last step. After a restore, the loop receives the batches since then
again. If no optimizer ever steps, as in an evaluation, every received batch counts.

    received batches  | b0 | b1 | b2 | b3 |
    optimizer steps             ^              a commit after b3 has the position after b1: b2 and b3 are received again
"""

from __future__ import annotations

from collections import deque
from typing import Any

from elastic.data.sample_partition import Position
from elastic.errors import Invalid


class DataProgress:
    """Tracker of one loader's position, and of the position that a commit contains.

    Args:
        ahead: number of batches that the loop fetches before it trains on the current one.
    """

    def __init__(self) -> None:
        self.position = Position()  # position of the next batch
        self.length: int | None = None  # length of the dataset at the start of this epoch
        self.by_steps = False  # whether an optimizer has stepped between two batches
        self.ahead = 0
        self._trained = Position()  # position at the last optimizer step
        # end positions of the batches that were handed out and not trained on yet
        self._handed: deque[Position] = deque([Position()], maxlen=1)

    @property
    def reached(self) -> Position:
        """Return the position after the last batch on which the script trains."""
        return self._handed[0]

    def begin(self, length: int | None) -> Position:
        """Start an iteration at the end of the previous one, and return this position.

        Raises:
            Invalid: the dataset has changed.
        """
        if self.position.consumed and self.length is not None and length != self.length:
            raise Invalid(
                f"the dataset has {length} samples now, but had {self.length} samples at the start of epoch"
                f" {self.position.epoch}, so the remaining samples can't be identified. {self.position.consumed}"
                " samples were already consumed. Change the dataset only between epochs, or skip the rest of"
                f" this epoch with set_epoch({self.position.epoch + 1})"
            )
        self.length = length
        self._handed = deque([self.position], maxlen=self.ahead + 1)
        if not self.by_steps:
            self._trained = self.position
        return self.position

    def hand(self, consumed: int) -> None:
        """Record that the loop has received a batch.

        ``consumed`` is the resulting number of consumed samples of the epoch.
        """
        self.position = Position(self.position.epoch, consumed)
        self._handed.append(self.position)

    def stepped(self) -> None:
        """Record that an optimizer has stepped after the loop received its last batch."""
        self.by_steps = True
        self._trained = self.reached

    def finish(self) -> None:
        """End the epoch and start the next one, because a batch was requested after the epoch's last batch."""
        last = self.reached
        self.position = Position(self.position.epoch + 1, 0)
        self.length = None
        if self.ahead:
            # The last batches count as trained on only after `settle`.
            self._handed = deque([Position(last.epoch, self._handed[-1].consumed)], maxlen=1)
        else:
            self.settle()

    def settle(self) -> None:
        """Count all batches that the loop has received as trained on."""
        self._trained = self.position
        self._handed = deque([self.position], maxlen=self.ahead + 1)

    def committed(self, *, before_steps: bool = False) -> Position:
        """Return the position that a commit contains now.

        Args:
            before_steps: whether an optimizer is about to step for the first time.
        """
        return self._trained if self.by_steps or before_steps else self.reached

    def go_to(self, position: Position, length: int | None = None) -> None:
        """Set the position. Exactly the samples before the position are then consumed."""
        if position != self.position or length is not None:
            self.length = length
        self.position = position
        self.settle()

    def state_dict(self, *, before_steps: bool = False) -> dict[str, Any]:
        """Return the values for a commit. Their size is constant."""
        position = self.committed(before_steps=before_steps)
        return {
            "epoch": position.epoch,
            "consumed": position.consumed,
            "length": self.length if position.epoch == self.position.epoch else None,
            "by_steps": self.by_steps,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.by_steps = bool(state["by_steps"])
        self.go_to(Position(state["epoch"], state["consumed"]), state["length"])
