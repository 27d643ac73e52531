"""Our tensors lie where we say, with the type that we say: a script may set torch's defaults as it likes."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[3]
# Those that look at torch's default device, and whether they look at its default dtype.
FACTORIES = {
    "arange": True,
    "as_tensor": True,
    "asarray": True,
    "empty": True,
    "eye": True,
    "full": True,
    "linspace": True,
    "normal": True,
    "ones": True,
    "rand": True,
    "randint": True,
    "randn": True,
    "randperm": True,
    "scalar_tensor": True,
    "tensor": True,
    "zeros": True,
    "Generator": False,
}


def sources() -> list[Path]:
    folders = [ROOT / "elastic", ROOT / "horovod"]
    return [file for folder in folders for file in folder.rglob("*.py")]


def unsaid(source: str) -> list[str]:
    """Calls of torch's factories that leave device or dtype to torch's defaults."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        module, name = node.func.value, node.func.attr
        if not (isinstance(module, ast.Name) and module.id == "torch"):
            continue
        if name not in FACTORIES:
            continue
        named = {keyword.arg for keyword in node.keywords}
        wanted = {"device", "dtype"} if FACTORIES[name] else {"device"}
        if not wanted <= named:
            found.append(f"line {node.lineno}: torch.{name} without {sorted(wanted - named)}")
    return found


def test_a_factory_that_leaves_it_to_the_defaults_is_found():
    assert unsaid("x = torch.zeros(3, device='cpu')") == ["line 1: torch.zeros without ['dtype']"]
    assert unsaid("torch.zeros(3, dtype=d, device=e)\ntorch.Generator(device='cpu')") == []


def test_every_tensor_of_ours_names_its_device_and_its_dtype():
    sources_of_torch = {file: text for file in sources() if "torch." in (text := file.read_text())}
    found = {str(file): lines for file, text in sources_of_torch.items() if (lines := unsaid(text))}
    assert len(sources_of_torch) > 50 and found == {}
