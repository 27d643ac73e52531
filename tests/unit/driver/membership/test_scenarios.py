"""Runs every scenario and compares it with its file. ``--rewrite-scenarios`` writes the files; read the diff then.

Scenarios are documentation too: docs/scenarios.md lists them.
"""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from harness.golden import raises, recorded
from harness.scenario import paragraph_of, played, title_of

ROOT = Path(__file__).parents[4]
FOLDER = Path(__file__).with_name("scenarios")
FILES = sorted(FOLDER.glob("*.txt"))
INDEX = ROOT / "docs" / "scenarios.md"
INTRODUCTION = """\
# Scenarios

Look up how the driver and the workers react when a worker dies, joins, freezes or gets stuck. Each scenario links to a
file with the full sequence of events and actions. The code of the driver and the worker generates these files.

In the scenario files, lines that begin with `>` are events. Indented lines are the actions of the driver or the worker,
with the seconds since the start. `h:2` is the first worker in slot 2 of host h, and `h:2#2` is the second worker in the
same slot.

The scenarios are also tests. `pytest tests/unit/driver/membership/test_scenarios.py` runs each scenario and compares
the output. `--rewrite-scenarios` updates the scenarios and this page to the current code. Review the diff.

```
 started ─► init() ─► ready ─► generation 1 ─► elastic.run ─► generation 2: training ─────────────► returned
                        ▲                                        │ a worker is lost    │ a worker joins or leaves
                        │                                        ▼                     ▼
                        └─────────── from the last commit ── generation is over    all stop at one safepoint
```
"""


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_scenario_matches_its_file(path, rewrite):
    text = path.read_text()
    now = played(text)
    if rewrite:
        path.write_text(now)
    else:
        assert now == text


def index() -> str:
    lines = [INTRODUCTION]
    for path in FILES:
        text = path.read_text()
        link = f"../{path.relative_to(ROOT)}"
        item = f"- [{title_of(text)}]({link}): {paragraph_of(text)}"
        lines.append(textwrap.fill(item, 120, subsequent_indent="  ", break_on_hyphens=False))
    return "\n".join(lines) + "\n"


def test_page_lists_all_scenarios(rewrite):
    if rewrite:
        INDEX.write_text(index())
    else:
        assert INDEX.read_text() == index()


STORY = """\
One of two dies

The other goes on.

settings: np=2 workers_min=1
given: all train

> h:1 exits with signal 9
"""


def test_indented_lines_are_rewritten():
    whole = played(STORY)
    recorded("messages", whole)
    assert played(whole) == whole
    assert played(whole.replace("break", "mend")) == whole


def test_unknown_line_is_an_error():
    with raises(ValueError):
        played(STORY + "> h:1 dances\n")
    with raises(ValueError):
        played("A\n\nB\n\nmachine: worker\n\n> it dances\n")
    with raises(ValueError):
        played(STORY.replace("all train", "all dance"))
