"""docs/ is correct: links, files, commands and flags exist; reference pages match the code."""

from __future__ import annotations

import argparse
import ast
import difflib
import functools
import importlib
import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from elastic.chaos.__main__ import COMMAND_LINE as CHAOS
from elastic.driver.commandline.options import command_names
from elastic.driver.commandline.setup import docs_cli
from elastic.script_checks.mistakes import PAGE, Kind
from harness.program import output_of
from harness.sources import INSTALLED, ROOT, facts, sources
from stress.__main__ import COMMAND_LINE as STRESS

DOCS = ROOT / "docs"
PAGES = sorted(
    [
        *DOCS.rglob("*.md"),
        *(ROOT / "tests").glob("*/README.md"),
        *(
            p
            for n in ("README", "CONTRIBUTING", "SECURITY", "CHANGELOG")
            if (p := ROOT / f"{n}.md").exists()
        ),
    ]
)
GENERATED = {"faults.md", "soak.md", "hosts.md"}  # by commands that take minutes
COLUMNS = 120
_LINK = re.compile(r"\[[^\]\n]*\]\(([^)\s]+)\)")
_FENCE = re.compile(r"^\s*(```|~~~)")
_COMMAND = re.compile(r"(?:^|[\s`(])((?:elasticrun|horovodrun)(?: [a-z0-9]+)?)((?: +[^`|\n#]*)?)")
_FLAG = re.compile(r"(?<![\w-])(--[a-z][a-z0-9-]*)")
_FILE = re.compile(
    r"`((?:elastic|driver|chaos|horovod|tests|benchmarks|examples|native|charts|docs)/[\w/.-]+\.\w+)`"
)
_MODULE = re.compile(r"python3? (?:-u )?-m (elastic[\w.]*|tests\.\w+)")
_TOOL = re.compile(r"(python -m (?:elastic\.chaos|tests\.stress)) ([a-z]+)([^`|#\n]*)")
_SCRIPT = re.compile(r"python3? (?:-u )?((?:examples|benchmarks|tests|docs)/[\w/]+\.py)")
_MAKE = re.compile(r"`make ([a-z][\w-]*)[^`\n]*`|^make ([a-z][\w-]*) *(?:#.*)?$", re.MULTILINE)


def reference() -> ModuleType:
    spec = importlib.util.spec_from_file_location("reference", DOCS / "site" / "reference.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def prose(text: str) -> Iterator[tuple[int, str]]:
    """Lines outside of code, with their numbers."""
    inside = False
    before = ""
    for number, line in enumerate(text.splitlines(), start=1):
        indented = line.startswith("    ") and (not before.strip() or before.startswith("    "))
        if _FENCE.match(line):
            inside = not inside
        elif not inside and not indented:
            yield number, line
        before = line


@functools.cache
def anchors(page: Path) -> set[str]:
    """Of its headings, as GitHub and the site make them."""
    found = set()
    for _, line in prose(page.read_text()):
        if line.startswith("#"):
            text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", line.lstrip("#").strip()).lower()
            found.add(re.sub(r"[^\w\- ]", "", text).replace(" ", "-"))
    return found


def test_relative_links_and_anchors_exist():
    lines = ((page, *found) for page in PAGES for found in prose(page.read_text()))
    for page, number, line in lines:
        for target in _LINK.findall(line):
            if re.match(r"[a-z]+:", target):
                continue  # elsewhere: nothing is asked of the network here
            path, _, anchor = target.partition("#")
            file = (page.parent / path).resolve() if path else page
            assert file.exists(), f"{page.name}:{number}: there is no {target}"
            if anchor and file.suffix == ".md":
                assert anchor in anchors(file), f"{page.name}:{number}: there is no {target}"


def test_no_line_of_prose_is_too_long():
    written = (page for page in PAGES if page.name not in GENERATED)
    long = [
        f"{page.relative_to(ROOT)}:{number}"
        for page in written
        if not page.is_relative_to(DOCS / "reference")
        for number, line in prose(page.read_text())
        if len(line) > COLUMNS and not line.lstrip().startswith("|") and " " in line[COLUMNS:]
    ]
    assert not long, f"more than {COLUMNS} columns: {long}"


_COUNTED = re.compile(r"^\| `(\S+\.py)`.* \| `(\S+\.py)`.* \| (\d+) of (\d+) \|$", re.MULTILINE)


def code(script: Path) -> list[str]:
    """Lines without the docstring, indentation, blank lines and comments behind code."""
    text = script.read_text()
    lines = text.splitlines()[ast.parse(text).body[0].end_lineno :]
    return [line.split("  #")[0].strip() for line in lines if line.strip()]


def test_pages_quote_the_number_of_lines_an_elastic_script_changes():
    found = _COUNTED.findall((DOCS / "pytorch.md").read_text())
    assert len(found) == 2
    for before, after, changed, whole in found:
        old, new = code(ROOT / before), code(ROOT / after)
        steps = difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes()
        count = sum(max(i2 - i1, j2 - j1) for tag, i1, i2, j1, j2 in steps if tag != "equal")
        assert (count, len(old)) == (int(changed), int(whole)), before


def test_readme_is_short():
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 150
    assert not [line for line in lines if len(line) > COLUMNS], "also in tables and code"


def quoted() -> Iterator[tuple[str, str, str]]:
    """Each command line of elasticrun in the pages: where, which command, and its own flags."""
    commands = reference().COMMANDS
    for page in PAGES:
        for number, line in enumerate(page.read_text().splitlines(), start=1):
            for name, rest in _COMMAND.findall(line):
                name = name.replace("horovodrun", "elasticrun")
                longer = f"{name} {rest.split()[0]}" if rest.split() else name
                if longer in commands:  # elasticrun checkpoints export
                    name, rest = longer, rest.partition(longer.rpartition(" ")[2])[2]
                if name not in commands:
                    name, rest = "elasticrun", f"{name.partition(' ')[2]} {rest}"
                yield (
                    f"{page.name}:{number}",
                    name,
                    re.split(r" (?:python\w*|--|\S+\.py) ", rest)[0],
                )


def test_every_flag_in_a_quoted_command_exists():
    known = {
        name: {flag for action in parser().actions for flag in action.option_strings}
        for name, parser in reference().COMMANDS.items()
    }
    lines = list(quoted())
    assert len(lines) > 60, "they are found"
    for where, name, rest in lines:
        for flag in _FLAG.findall(rest):
            assert flag in known[name], f"{where}: {name} has no flag {flag}"


def test_every_flag_in_a_quoted_command_of_the_fault_tools_exists():
    seen = [(p.name, *each) for p in PAGES for each in _TOOL.findall(p.read_text())]
    assert len(seen) > 15, "they are found"
    commands = {tool.program: tool.commands for tool in (CHAOS, STRESS)}
    for page, program, name, rest in seen:
        module = importlib.import_module(commands[program][name][0])
        parser = argparse.ArgumentParser()
        module.add_arguments(parser)
        known = _FLAG.findall(parser.format_help())
        for flag in _FLAG.findall(rest.split(" -- ")[0]):
            assert flag in known, f"{page}: {name} has no flag {flag}"


def test_every_named_program_exists():
    seen = 0
    for page in PAGES:
        text = page.read_text()
        for script in _SCRIPT.findall(text):
            assert (ROOT / script).is_file(), f"{page.name}: there is no {script}"
        for module in _MODULE.findall(text):
            parts = ROOT.joinpath(*module.removesuffix(".").split("."))
            assert parts.with_suffix(".py").exists() or parts.is_dir(), f"{page.name}: {module}"
            seen += 1
    assert seen > 10


def test_every_named_file_exists():
    seen = 0
    for page in PAGES:
        for file in _FILE.findall(page.read_text()):
            assert (ROOT / file).exists(), f"{page.name}: there is no {file}"
            seen += 1
    assert seen > 30


def test_every_named_make_target_exists():
    made = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in PAGES:
        for target in map("".join, _MAKE.findall(page.read_text())):
            assert target in made or target.startswith(
                ("test-on", "versioned-on", "versioned-with")
            ), f"{page.name}: make {target}"


def test_reference_pages_match_the_code():
    assert not reference().outdated(), "run: python docs/site/reference.py"


def test_every_command_has_a_section_in_the_reference():
    """`cli.main` knows them by their first word."""
    tree = ast.parse((ROOT / "driver/commandline/cli.py").read_text())
    [main] = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "main"]
    words = {
        str(each.value)
        for node in ast.walk(main)
        if isinstance(node, ast.Compare) and ast.unparse(node.left) == "arguments[0]"
        for comparator in node.comparators
        for each in ast.walk(comparator)
        if isinstance(each, ast.Constant)
    }
    assert "explain" in words, "they are found"
    shown = {name.partition(" ")[2] for name in reference().COMMANDS} | {"secret"}
    words |= set(command_names.COMMANDS)
    assert words <= shown, f"docs/site/reference.py lacks {words - shown}"


_SHOWN = re.compile(r"`?elasticrun docs`? ([a-z][\w/-]*)(?:#([a-z-]+))?")


def shown_strings() -> Iterator[tuple[Path, str]]:
    """Return the strings of the installed packages that a user may read."""
    return ((file, text) for file in sources(*INSTALLED) for text in facts(file).texts)


def test_messages_name_no_page_by_an_uninstalled_path():
    named = [
        f"{file.relative_to(ROOT)}: {text[:80]}"
        for file, text in shown_strings()
        if re.search(r"(?<!-)\bdocs/[\w-]+\.md", text)
    ]
    assert not named


def test_every_page_named_in_a_message_is_shown_by_the_docs_command(capsys):
    named = {found for _, text in shown_strings() for found in _SHOWN.findall(text)}
    assert {"many-hosts", "checkpoints", "spot", "detection"} <= {page for page, _ in named}
    for page, section in sorted(named):
        assert docs_cli.main([f"{page}#{section}" if section else page]) == 0, page
        assert capsys.readouterr().out.startswith("#")
    for kind in Kind:
        assert docs_cli.main([f"{PAGE}#{kind.value}"]) == 0


def test_navigation_lists_exactly_the_existing_pages():
    class Loader(yaml.SafeLoader):
        """mkdocs has tags of its own."""

    Loader.add_multi_constructor("!", lambda loader, suffix, node: None)
    named: set[str] = set()

    def walk(value: object) -> None:
        if isinstance(value, str):
            named.add(value)
        for each in (
            value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        ):
            walk(each)

    walk(yaml.load((ROOT / "mkdocs.yml").read_text(), Loader)["nav"])
    there = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")}
    assert there <= named, f"mkdocs.yml lacks {there - named}"
    assert named <= there, f"mkdocs.yml names {named - there}, which are not there"


@pytest.mark.nightly
def test_the_site_is_built_without_a_warning(tmp_path):
    pytest.importorskip("mkdocs", reason="make docs installs it")
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path]
    output_of(*words, cwd=ROOT, timeout=110)
    assert (tmp_path / "reference" / "python.html").exists()
