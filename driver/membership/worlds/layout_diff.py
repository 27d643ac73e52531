"""Description of the differences between two state layouts. Pure: no I/O, no clock."""

from __future__ import annotations

from collections import Counter

SHOWN = 10  # maximum number of lines in a description


def difference(own: str, expected: str) -> str:
    """Describe the differences between a worker's layout and the world's.

    Returns:
        At most SHOWN + 1 lines, which list the entries that only one of the layouts contains. A layout has one line per
        tensor or option, such as ``model.0.weight float32 [10, 20]``.
    """
    only_own = _surplus(own, expected)
    only_expected = dict(_named(line) for line in _surplus(expected, own))
    lines = []
    for line in only_own:
        name, rest = _named(line)
        if name in only_expected:
            lines.append(f"{name}: {rest} here, {only_expected.pop(name)} in the world")
        else:
            lines.append(f"{line}: only here")
    lines += [
        f"{name} {rest}".rstrip() + ": only in the world" for name, rest in only_expected.items()
    ]
    if not lines:
        lines = [
            "the same entries in another order: build the model in the same order on every worker"
        ]
    if len(lines) > SHOWN:
        lines[SHOWN:] = [f"... and {len(lines) - SHOWN} more"]
    return "\n".join(lines)


def _surplus(lines: str, others: str) -> list[str]:
    left = Counter(others.splitlines())
    surplus = []
    for line in lines.splitlines():
        if left[line]:
            left[line] -= 1
        else:
            surplus.append(line)
    return surplus


def _named(line: str) -> tuple[str, str]:
    name, _, rest = line.partition(" ")
    return name, rest
