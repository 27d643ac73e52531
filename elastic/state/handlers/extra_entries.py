"""State dict entries that are not registered tensors, such as quantized weights, counters and vocabularies.

A module class can override ``state_dict`` and ``load_state_dict``, override torch's internal methods that save and load
a single module, or add hooks. The entries that such a module adds are committed, restored and sent as Python values,
and loaded with the module's own methods. A module that has no such entries when the model is added to the state is not
checked again.
"""

from __future__ import annotations

from typing import Any

import torch

from elastic.errors import StateMismatch

Module = torch.nn.Module
Entries = dict[str, dict[str, Any]]  # entries by module path, then by key
EXTRA = "_extra_state"  # torch's key for the result of get_extra_state()


class ExtraEntries:
    """Entries that the modules of ``model`` add to its state dict, beyond registered tensors."""

    def __init__(self, model: Module) -> None:
        self._askable: dict[str, Module] = {}
        for path, module in model.named_modules():
            if not _has_extra_entries(module) or self._inside(path):
                continue
            self._askable[path] = module
            if not _added(module):
                del self._askable[path]

    def _inside(self, path: str) -> bool:
        return any(
            not above or path.startswith(f"{above}.")
            for above, module in self._askable.items()
            if _whole(module)
        )

    def present(self) -> Entries:
        """Return the current entries. Their values may share memory with the modules."""
        return {path: _added(module) for path, module in self._askable.items()}

    def load(self, entries: Entries) -> None:
        """Load the entries into the modules, together with the modules' current tensors.

        Raises:
            StateMismatch: a module does not accept the entries.
        """
        for path, added in entries.items():
            module = self._askable.get(path)
            if module is None:
                raise StateMismatch(
                    f"the commit contains {', '.join(added)} of the module {path or 'itself'}, but the module's"
                    " state_dict() on this worker lacks these entries: use the same model on all workers"
                )
            with torch.no_grad():
                _load(module, _entries(module) | added)


def _has_extra_entries(module: Module) -> bool:
    if isinstance(module, torch.jit.ScriptModule):
        return False
    return _whole(module) or type(module)._save_to_state_dict is not Module._save_to_state_dict


def _whole(module: Module) -> bool:
    return type(module).state_dict is not Module.state_dict or bool(module._state_dict_hooks)


def _entries(module: Module) -> dict[str, Any]:
    if _whole(module):
        return dict(module.state_dict())
    found: dict[str, Any] = {}
    module._save_to_state_dict(found, "", keep_vars=False)
    return found


def _added(module: Module) -> dict[str, Any]:
    registered = {
        name: tensor
        for tensors in (
            module.named_parameters(remove_duplicate=False),
            module.named_buffers(remove_duplicate=False),
        )
        for name, tensor in tensors
    }
    places = {each for tensor in registered.values() if (each := _place(tensor))}
    return {
        key: value
        for key, value in _entries(module).items()
        if key not in registered
        and key.rpartition(".")[2] != EXTRA
        and not (isinstance(value, torch.Tensor) and _place(value) in places)
    }


def _place(tensor: torch.Tensor) -> int:
    if tensor.layout != torch.strided or tensor.is_meta or tensor.is_mkldnn:
        return 0
    return tensor.data_ptr()


def _load(module: Module, entries: dict[str, Any]) -> None:
    if not _whole(module):
        errors: list[str] = []
        version = {"version": module._version}
        module._load_from_state_dict(entries, "", version, False, [], [], errors)
        if errors:
            raise StateMismatch(
                f"the module does not accept entries of the commit ({'; '.join(errors)}): use the same model on all"
                " workers"
            )
    elif type(module).load_state_dict is Module.load_state_dict:
        module.load_state_dict(entries, strict=False)
    else:
        module.load_state_dict(entries)
