"""Handlers that commit, restore and send single values of a state.

`StateHandler` is Horovod's interface, for user-defined handlers. `Part` is this package's interface: it splits a value
into a structure (Python values) and named tensors. Commits, restores and transfers all use this form.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from elastic.runtime import lifecycle
from elastic.state.handlers import state_transfer
from elastic.state.handlers.python_values import copied
from elastic.state.handlers.tensor_spec import Destination, TensorSpec
from elastic.state.snapshots import pinned_copy
from elastic.state.snapshots.snapshot import Snapshot


class StateHandler:
    """Handler of one value of a `TorchState`. ``sync`` is a collective of all workers, with rank 0 as the root."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def save(self) -> None:
        """Save a copy of the value."""
        raise NotImplementedError

    def restore(self) -> None:
        """Restore the value from the saved copy."""
        raise NotImplementedError

    def sync(self) -> None:
        """Copy the value from rank 0 to all workers."""
        raise NotImplementedError

    def set_value(self, value: Any) -> None:
        """Set another value, and save a copy of it."""
        self.value = value
        self.save()


class Part(StateHandler):
    """Handler of a value that a `TorchState` commits at memory bandwidth and transfers with all other parts."""

    def __init__(self, value: Any, name: str = "") -> None:
        super().__init__(value)
        self.name = name
        self.snapshot = Snapshot()
        self._adopt_value()
        self.save()

    # ---- methods that each kind of part implements -----------------------------------------------

    def _adopt_value(self) -> None:
        """Validate and prepare a new value."""

    def layout(self) -> list[str]:
        """Return the lines of this value's layout, which must be equal on all workers."""
        return []

    def pack(self) -> tuple[Any, dict[str, torch.Tensor]]:
        """Return a structure of Python values, to be copied or pickled, and the detached live tensors by name."""
        raise NotImplementedError

    def versions(self) -> dict[str, int]:
        """Return the versions of tensors that a worker need not receive if the sender's version is the same.

        Default: none.
        """
        return {}

    def live(self) -> tuple[Any, dict[str, torch.Tensor]]:
        """Return a structure and the live tensors for a commit. Like `pack`, but the tensors need not be detached."""
        return self.pack()

    def check(self) -> None:
        """Check, before any value is copied, that this value can be committed.

        Raises:
            Invalid: the value can't be committed. The last commit stays complete.
        """

    def seems_unchanged(self) -> bool:
        """Return False if the value may have changed since the last call, according to cheap checks."""
        return True

    def described(self, structure: Any, own: Any, tensors: dict[str, torch.Tensor]) -> Any:
        """Return a commit in the form of the value's ``state_dict()``, with the tensors in ``tensors``."""
        return structure

    def own(self) -> Any:
        """Return objects that a commit references and that are never sent to other workers."""
        return None

    def destinations(
        self, structure: Any, specs: dict[str, TensorSpec], *, restoring: bool
    ) -> dict[str, torch.Tensor | Destination]:
        """Return the destination of each tensor.

        A tensor is received in place if there is a live one of the same type.
        """
        return dict.fromkeys(specs, Destination.NEW)

    def place(
        self, structure: Any, fresh: dict[str, torch.Tensor], own: Any, *, restoring: bool
    ) -> None:
        """Replace the whole value with a structure and newly allocated tensors (``fresh``)."""
        raise NotImplementedError

    def check_received(self) -> None:
        """Check the value after the whole state has been received and set.

        Raises:
            StateMismatch: with the same state, this worker would compute different results than the sender.
        """

    def reset(self) -> None:
        """Adapt the value to a change of the world."""

    def bytes_to_come(self) -> int:
        """Return the estimated size in bytes of the CPU tensors that a joining worker allocates for received values."""
        return 0

    def bytes_of_gradients(self) -> int:
        """Return the size in bytes of this value's CPU gradients, which are reduced within a host."""
        return 0

    def build_step(self, step_input: bytes) -> None:
        """Prepare a joining worker's first step before the worker reports ready.

        ``step_input`` describes the batches.
        """

    def digested(self) -> dict[str, torch.Tensor]:
        """Return the committed tensors that must be equal on all workers."""
        return {}

    def digested_buffers(self) -> dict[str, torch.Tensor]:
        """Return the committed tensors that are reported in digests but may differ between workers."""
        return {}

    def committed(self) -> dict[str, torch.Tensor]:
        """Return all committed tensors, with names that are the same on all workers."""
        return self.snapshot.bank.buffers()

    def equal_everywhere(self, structure: Any) -> set[str] | None:
        """Return the names of a commit's tensors that are equal on all workers, or None if all are."""
        return None

    def differing(self) -> list[str]:
        """Return the names of the tensors that differ from the commit.

        The result is empty if workers may have different values.
        """
        return []

    # ---- Horovod's interface ---------------------------------------------------------------------

    def set_value(self, value: Any) -> None:
        self.value = value
        self.snapshot = Snapshot()
        self._adopt_value()
        self.save()

    def save(self) -> None:
        """Save a copy of the value. Copies of CUDA tensors may still be in flight when this returns.

        Raises:
            Invalid: the value cannot be copied.
        """
        structure, tensors = self.live()
        extra = copied(structure, self.what), self.own()
        self.snapshot.take(tensors, extra, trust=self.seems_unchanged())

    def restore(self) -> None:
        """Restore the value to exactly the saved bits, in place if the shapes agree.

        Raises:
            DeviceLost: the accelerator failed.
        """
        bank = self.snapshot.bank
        saved, own = bank.extra
        structure = copied(saved, self.what)
        buffers = bank.buffers()
        specs = {name: TensorSpec.of(buffer) for name, buffer in buffers.items()}
        self.before_restore(own)
        fresh = {}
        transit = pinned_copy.PinnedCopy()
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
        """Handle a restore without a complete copy. The value itself is left unchanged."""

    def before_restore(self, own: Any) -> None:
        """Restore the objects that the committed tensors belong to.

        This method is called before the tensors are restored.
        """

    def sync(self) -> None:
        """Broadcast the value from rank 0, and save a copy of it."""
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
    """Handler of objects with ``state_dict()`` and ``load_state_dict()``, such as LR schedulers and scalers."""

    def layout(self) -> list[str]:
        return [f"{self.name} {type(self.value).__name__}"]

    def pack(self) -> tuple[Any, dict[str, torch.Tensor]]:
        return self.value.state_dict(), {}

    def place(
        self, structure: Any, fresh: dict[str, torch.Tensor], own: Any, *, restoring: bool
    ) -> None:
        self.value.load_state_dict(structure)


class ScalerPart(DictPart):
    """Handler of a `torch.amp.GradScaler`.

    The scaler's ``state_dict()`` does not contain the optimizers that were unscaled since the last ``update()``. A
    restore must clear their record.
    """

    value: torch.amp.GradScaler

    def place(
        self, structure: Any, fresh: dict[str, torch.Tensor], own: Any, *, restoring: bool
    ) -> None:
        super().place(structure, fresh, own, restoring=restoring)
        if self.value.is_enabled():
            # The interrupted step may have called unscale_() or step(), which must not be called twice between two
            # updates.
            self.value._per_optimizer_states.clear()


class Carried:
    """Base class of values that can be put into any state, because they define a state dict.

    Args:
        own: whether the value is local to this worker. A local value is committed and restored, but never sent.
    """

    own = False

    def state_dict(self) -> dict[str, Any]:
        """Return Python values and tensors. The caller may keep them, so they must not be modified later."""
        raise NotImplementedError

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the value from ``state``, which must not be modified."""
        raise NotImplementedError

    @staticmethod
    def of(value: Any) -> Any:
        """Wrap a value of another type that has ``state_dict()`` and ``load_state_dict()``."""
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
    """Handler of a `Carried` value."""

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
    """Handler of an `elastic.Shards`, which saves the step number.

    The layout describes the arithmetic of this process, so that a worker whose results would not be bitwise identical
    is rejected before it joins.
    """

    def layout(self) -> list[str]:
        lines = [f"{self.name} {line}" for line in self.value.layout]
        if self.value.verify:
            lines.append(f"{self.name}.verify {self.value.verify}")
        return lines if self._allowed() else lines + self._arithmetic()

    def _allowed(self) -> bool:
        runtime = lifecycle.active()
        return runtime is not None and runtime.env.allow_inexact

    def _arithmetic(self) -> list[str]:
        return [f"{self.name}.{line}" for line in self.value.arithmetic]

    def comparable(self, layout: str) -> str:
        """Return the lines of the layout that a checkpoint must match.

        The share of verified shards is omitted, because it does not affect results. With --allow-inexact, the
        arithmetic is also omitted.
        """
        left_out = [f"{self.name}.verify "]
        if self._allowed():
            left_out.append(f"{self.name}.arithmetic.")
        lines = layout.splitlines()
        return "\n".join(line for line in lines if not line.startswith(tuple(left_out)))

    def resume_from(self, layout: str) -> None:
        """Check that a loaded checkpoint has the same arithmetic, unless it was written with --allow-inexact."""
        lines = layout.splitlines()
        before = [line for line in lines if line.startswith(f"{self.name}.arithmetic.")]
        differs = [line for line in self._arithmetic() if before and line not in before]
        if differs:
            self.value.computes_differently(
                "this worker computes with other settings or versions than the workers that wrote the checkpoint:"
                f" {', '.join(differs[:3])}"
            )


class SamplerStateHandler(DictPart):
    """Handler of an `ElasticSampler`, which saves its epoch and progress."""

    def layout(self) -> list[str]:
        return [f"{self.name} {type(self.value).__name__} of {len(self.value.dataset)}"]

    def reset(self) -> None:
        self.value.reset()
