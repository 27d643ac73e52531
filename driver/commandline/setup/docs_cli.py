"""``elasticrun docs``: print pages of the documentation, which is installed with the package."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from pathlib import Path

import elastic
from elastic.driver.commandline.options.argument_parser import ArgumentParser
from elastic.errors import Invalid

DESCRIPTION = """\
Print a page of the documentation, or one section of it; without a name, list the pages."""
_HEADING = re.compile(r"(#+) +(.*)")


def parser() -> ArgumentParser:
    """Return the parser of ``elasticrun docs``."""
    made = ArgumentParser(
        prog="elasticrun docs", usage="elasticrun docs [PAGE[#SECTION]]", description=DESCRIPTION
    )
    made.group("general")("-h --help", None, None, "Show this help and exit.", action="help")
    return made


def main(arguments: Sequence[str]) -> int:
    """Run ``elasticrun docs`` and return its exit code.

    Raises:
        Invalid: the page or its section does not exist.
    """
    if not arguments:
        for name, path in pages().items():
            if not name.startswith("decisions/"):
                print(f"{name:<24}{_title(path.read_text(encoding='utf-8'))}")
        return 0
    word = parser().with_one(arguments, None, "pass one page, as in: elasticrun docs many-hosts")
    name, _, section = word.partition("#")
    known = pages()
    name = name.removeprefix("docs/").removesuffix(".md")
    if name not in known:
        raise Invalid(f"no page is called {name}{_near(name, list(known))}: see elasticrun docs")
    text = known[name].read_text(encoding="utf-8")
    if section:
        sections = by_section(text)
        if section not in sections:
            raise Invalid(
                f"page {name} has no section {section}{_near(section, list(sections))}: see elasticrun docs"
                f" {name}"
            )
        text = sections[section]
    print(text.rstrip())
    return 0


def pages() -> dict[str, Path]:
    """Return all pages, sorted and keyed by name without the suffix .md. Raises Invalid if no pages are installed."""
    package = Path(elastic.__file__).parent
    folder = next(
        (each for each in (package / "docs", package.parent / "docs") if each.is_dir()), None
    )
    if folder is None:
        raise Invalid(f"the documentation is missing from {package}: reinstall hvd-elastic")
    found = {
        path.relative_to(folder).with_suffix("").as_posix(): path for path in folder.rglob("*.md")
    }
    return dict(sorted(found.items()))


def by_section(text: str) -> dict[str, str]:
    """Return the sections of a page, each with its subsections, keyed by the anchor of the heading."""
    lines = text.splitlines()
    starts: list[tuple[int, int, str]] = []  # (line, depth, anchor) of each heading
    in_code = False
    for number, line in enumerate(lines):
        in_code ^= line.startswith("```")
        heading = _HEADING.fullmatch(line)
        if heading and not in_code:
            plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading[2]).lower()
            anchor = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
            starts.append((number, len(heading[1]), anchor))
    found = {}
    for place, (number, depth, anchor) in enumerate(starts):
        after = (later for later, deep, _ in starts[place + 1 :] if deep <= depth)
        found[anchor] = "\n".join(lines[number : next(after, len(lines))])
    return found


def _title(text: str) -> str:
    return next((line.lstrip("# ") for line in text.splitlines() if line.startswith("#")), "")


def _near(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]}?" if near else ""
