"""Our tensors have an explicit device and dtype: a script may set any defaults of torch."""

from __future__ import annotations

from harness.sources import Facts, facts, facts_of, sources

# Factories that use torch's default device, and whether they use its default dtype.
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


def unsaid(found: Facts) -> list[str]:
    """Find calls of torch's factories without an explicit device or dtype."""
    missing = []
    for name, line, named in found.of_torch:
        wanted = {"device", "dtype"} if FACTORIES.get(name) else {"device"}
        if name in FACTORIES and not wanted <= named:
            missing.append(f"line {line}: torch.{name} without {sorted(wanted - named)}")
    return missing


def test_tensor_factory_without_device_or_dtype_is_found():
    found = facts_of("x = torch.zeros(3, device='cpu')")
    assert unsaid(found) == ["line 1: torch.zeros without ['dtype']"]
    said = facts_of("torch.zeros(3, dtype=d, device=e)\ntorch.Generator(device='cpu')")
    assert unsaid(said) == []


def test_tensors_are_created_with_an_explicit_device_and_dtype():
    with_torch = [file for file in sources("elastic", "horovod") if facts(file).of_torch]
    assert len(with_torch) > 50
    assert not {str(file): lines for file in with_torch if (lines := unsaid(facts(file)))}
