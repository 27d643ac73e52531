"""One value that a state handles by itself: how it is committed, restored, and sent to a worker that lacks it.

`StateHandler` is Horovod's interface, for handlers of users' own. `Part` is ours: it takes a value apart into a
structure (Python values) and named tensors, so that commits, restores and transfers share one description of it.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from elastic.runtime import lifecycle
from elastic.state import state_transfer
from elastic.state.handlers.python_values import copied
from elastic.state.handlers.tensor_spec import Destination, TensorSpec
from elastic.state.snapshots import pinned
from elastic.state.snapshots.snapshot import Snapshot


class StateHandler:
    """How a `TorchState` treats one value. ``sync`` is called on every worker at once, as a collective from rank 0."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def save(self) -> None:
        """Keeps a copy of the present value."""
        raise NotImplementedError

    def restore(self) -> None:
        """Sets the value back to the copy."""
        raise NotImplementedError

    def sync(self) -> None:
        """Makes the value equal to rank 0's, everywhere."""
        raise NotImplementedError

    def set_value(self, value: Any) -> None:
        """Handles another value from now on; it is saved at once."""
        self.value = value
        self.save()


class Part(StateHandler):
    """A handler that a `TorchState` can commit at memory speed and send in one transfer with the others."""

    def __init__(self, value: Any, name: str = "") -> None:
        super().__init__(value)
        self.name = name
        self.snapshot = Snapshot()
        self._adopt_value()
        self.save()

    # ---- what each kind of value says ------------------------------------------------------------

    def _adopt_value(self) -> None:
        """Checks and prepares a value that is handled from now on."""

    def layout(self) -> list[str]:
        """The lines that must agree on all workers."""
        return []

    def pack(self) -> tuple[Any, dict[str, torch.Tensor]]:
        """A structure of Python values that can be copied and pickled, and the live tensors, dense and detached."""
        raise NotImplementedError

    def live(self) -> tuple[Any, dict[str, torch.Tensor]]:
        """As `pack`, for a commit: tensors need not be detached."""
        return self.pack()

    def seems_unchanged(self) -> bool:
        """False if there is evidence that the value was worked on since this was last asked."""
        return True

    def described(self, structure: Any, own: Any, tensors: dict[str, torch.Tensor]) -> Any:
        """A commit as the value's ``state_dict()`` would give it. The tensors in it are those of ``tensors``."""
        return structure

    def own(self) -> Any:
        """Objects that a commit refers to and a transfer leaves out."""
        return None

    def destinations(
        self, structure: Any, specs: dict[str, TensorSpec], *, restoring: bool
    ) -> dict[str, torch.Tensor | Destination]:
        """Where tensors of a structure go: live tensors, where they fit."""
        return dict.fromkeys(specs, Destination.NEW)

    def place(
        self, structure: Any, fresh: dict[str, torch.Tensor], own: Any, *, restoring: bool
    ) -> None:
        """Takes over a structure, and the tensors that had nowhere to go. Afterwards nothing of before is left."""
        raise NotImplementedError

    def check_received(self) -> None:
        """Called once a whole state was received and taken over. Raises StateMismatch for what this worker, with the
        same state, would compute differently from rank 0.
        """

    def reset(self) -> None:
        """The world has changed."""

    def bytes_to_come(self) -> int:
        """Bytes of the CPU tensors that a joining worker probably lacks and receives."""
        return 0

    def bytes_of_gradients(self) -> int:
        """Bytes of the CPU gradients that this value reduces within a host."""
        return 0

    def build_step(self, step_input: bytes) -> None:
        """Before a newcomer is ready: what its first step would take time for, on batches of this kind."""

    def digested(self) -> dict[str, torch.Tensor]:
        """The committed tensors that must be equal on all workers."""
        return {}

    def digested_buffers(self) -> dict[str, torch.Tensor]:
        """The committed tensors that each worker may have others of, and that are reported all the same."""
        return {}

    def committed(self) -> dict[str, torch.Tensor]:
        """All committed tensors, by names that mean the same on all workers."""
        return self.snapshot.bank.buffers()

    def equal_everywhere(self, structure: Any) -> set[str] | None:
        """Names of the tensors of a commit that are equal on all workers; None: all are."""
        return None

    def differing(self) -> list[str]:
        """Names of tensors that must be equal on all workers, and differ from what is committed."""
        return []

    # ---- Horovod's interface ---------------------------------------------------------------------

    def set_value(self, value: Any) -> None:
        self.value = value
        self.snapshot = Snapshot()
        self._adopt_value()
        self.save()

    def save(self) -> None:
        """Copies the value. CUDA tensors are under way when it returns; all others are copied. Raises Invalid."""
        structure, tensors = self.live()
        extra = copied(structure, self.what), self.own()
        self.snapshot.take(tensors, extra, trust=self.seems_unchanged())

    def restore(self) -> None:
        """Sets the value to exactly the bits that were saved, in place where the shapes agree. Raises DeviceLost."""
        bank = self.snapshot.bank
        saved, own = bank.extra
        structure = copied(saved, self.what)
        buffers = bank.buffers()
        specs = {name: TensorSpec.of(buffer) for name, buffer in buffers.items()}
        self.before_restore(own)
        fresh = {}
        transit = pinned.PinnedCopy()
        with torch.no_grad():
            places = self.destinations(structure, specs, restoring=True)
            for name, where in places.items():
                if isinstance(where, torch.Tensor):
                    where.copy_(buffers[name], non_blocking=True)
                elif where is Destination.NEW:
                    fresh[name] = buffers[name].clone()
            self.place(structure, fresh, own, restoring=True)
        written: dict[torch.device, int] = {}
        for where in places.values():
            if isinstance(where, torch.Tensor) and where.is_cuda:
                written[where.device] = written.get(where.device, 0) + where.nbytes
        for device, size in written.items():
            transit.follow(device, size)
        transit.wait()
        bank.adopt(self.live()[1])
        self.seems_unchanged()

    def restore_nothing(self) -> None:
        """As `restore`, where nothing whole is saved: the value stays as it is."""

    def before_restore(self, own: Any) -> None:
        """Puts back what the committed tensors belong to."""

    def sync(self) -> None:
        """Broadcasts this value alone from rank 0 and saves it."""
        rt = lifecycle.active()
        if rt is not None:
            group = rt.group("state", torch.device("cpu"))
            with rt.guard(f"copy of {self.what}"):
                layout = "\n".join(self.layout())
                state_transfer.transfer(
                    group, 0, {self.name: self}, {}, layout, functools.partial(rt.group, "state")
                )
            self.check_received()
        self.reset()
        self.save()

    @property
    def what(self) -> str:
        return f"state.{self.name}" if self.name else type(self.value).__name__


class DictPart(Part):
    """Anything with ``state_dict()`` and ``load_state_dict()``: learning rate schedulers, gradient scalers."""

    def layout(self) -> list[str]:
        return [f"{self.name} {type(self.value).__name__}"]

    def pack(self) -> tuple[Any, dict[str, torch.Tensor]]:
        return self.value.state_dict(), {}

    def place(
        self, structure: Any, fresh: dict[str, torch.Tensor], own: Any, *, restoring: bool
    ) -> None:
        self.value.load_state_dict(structure)


class ScalerPart(DictPart):
    """A `torch.amp.GradScaler`. Its ``state_dict()`` lacks the optimizers unscaled since the last ``update()``."""

    value: torch.amp.GradScaler

    def place(
        self, structure: Any, fresh: dict[str, torch.Tensor], own: Any, *, restoring: bool
    ) -> None:
        super().place(structure, fresh, own, restoring=restoring)
        if self.value.is_enabled():
            # The step that broke off may have called unscale_() or step(), which refuse a second call.
            self.value._per_optimizer_states.clear()


class Carried:
    """A value that says itself what it consists of. Subclasses are handled in any state.

    ``own``: what it consists of is this worker's alone. It is committed and restored, and sent to nobody.
    """

    own = False

    def state_dict(self) -> dict[str, Any]:
        """Python values and tensors, which the caller may keep: not those that change later."""
        raise NotImplementedError

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Becomes what it was. The caller keeps ``state``."""
        raise NotImplementedError

    @staticmethod
    def of(value: Any) -> Any:
        """A value that no state knows, but that has the two methods."""
        known = isinstance(value, torch.optim.lr_scheduler.LRScheduler | Carried)
        return value if known else _CarriedFor(value)


class _CarriedFor(Carried):
    def __init__(self, value: Any) -> None:
        self._value = value

    def state_dict(self) -> dict[str, Any]:
        found: dict[str, Any] = self._value.state_dict()
        return found

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._value.load_state_dict(state)


class CarriedPart(DictPart):
    """A `Carried`."""

    value: Carried

    def pack(self) -> tuple[Any, dict[str, torch.Tensor]]:
        return ({} if self.value.own else self.value.state_dict()), {}

    def own(self) -> Any:
        return self.value.state_dict() if self.value.own else None

    def place(
        self, structure: Any, fresh: dict[str, torch.Tensor], own: Any, *, restoring: bool
    ) -> None:
        if not self.value.own:
            self.value.load_state_dict(structure)
        elif restoring:
            self.value.load_state_dict(own)


class ShardsStateHandler(DictPart):
    """An `elastic.Shards`: the number of the step. Its layout says how this process computes, so that one that computes
    differently is turned away before it joins.
    """

    def layout(self) -> list[str]:
        said = [f"{self.name} {line}" for line in self.value.layout]
        return said if self._allowed() else said + self._arithmetic()

    def _allowed(self) -> bool:
        runtime = lifecycle.active()
        return runtime is not None and runtime.env.allow_inexact

    def _arithmetic(self) -> list[str]:
        return [f"{self.name}.{line}" for line in self.value.arithmetic]

    def comparable(self, layout: str) -> str:
        """The part of the layout that a checkpoint must match: with --allow-inexact without the arithmetic."""
        if not self._allowed():
            return layout
        told = f"{self.name}.arithmetic."
        return "\n".join(line for line in layout.splitlines() if not line.startswith(told))

    def resume_from(self, layout: str) -> None:
        """A checkpoint was loaded that says how it was computed, unless it was written with --allow-inexact."""
        said = layout.splitlines()
        before = [line for line in said if line.startswith(f"{self.name}.arithmetic.")]
        differs = [line for line in self._arithmetic() if before and line not in before]
        if differs:
            self.value.computes_differently(
                f"this worker computes differently from those that wrote the checkpoint: {', '.join(differs[:3])}"
            )


class SamplerStateHandler(DictPart):
    """An `ElasticSampler`: its epoch and its progress."""

    def layout(self) -> list[str]:
        return [f"{self.name} {type(self.value).__name__} of {len(self.value.dataset)}"]

    def reset(self) -> None:
        self.value.reset()
