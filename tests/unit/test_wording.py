"""Tests of real jobs expect the product's wording: changed sentences fail here first."""

from __future__ import annotations

import re

import pytest

from harness import wording
from harness.prose import NUMBER
from harness.sources import INSTALLED, ROOT, facts, sources

PATTERNS = {
    name: text
    for name, text in vars(wording).items()
    if name.isupper() and isinstance(text, str) and name.split("_")[0] not in wording.DERIVED
}


@pytest.fixture(scope="module")
def sentences() -> str:
    """Every string of the product; an expression in one, and a number, is a blank."""
    rooms = (*INSTALLED, "charts", "tests/harness/fake_cuda", "tests/stress")
    found = [
        NUMBER.sub(" ", text.replace("{}", " "))
        for file in sources(*rooms)
        for text in facts(file).texts
    ]
    pages = [path.read_text() for path in (ROOT / "driver").rglob("*.js")]
    templates = [path.read_text() for path in (ROOT / "charts").rglob("*.*")]
    return "\n".join([*found, *pages, *templates])


@pytest.mark.parametrize("name", PATTERNS)
def test_expected_wording_occurs_in_the_product(name, sentences):
    """What stands between facts: as it is there, or half of it, as a worker or a job may be named within."""
    text = re.sub(
        r"\\[dswSb][+*]?|%s|\.\*|\[\^?\S-\S\]|[()|^$]", "\0", PATTERNS[name].replace(r"\(", "(")
    )
    stretches = re.split(r"\0|\(|\)", NUMBER.sub("\0", text).replace("\\", ""))
    words = max((each.split() for each in stretches), key=len)
    most = max(2, len(words) // 2)
    runs = [words[at : at + most] for at in range(len(words) - most + 1)]
    assert runs, "it has no two words together: look for it where it is used"
    assert any(" ".join(run) in sentences for run in runs), words
