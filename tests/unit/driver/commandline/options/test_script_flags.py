"""Flags that a script defines, from its source."""

from __future__ import annotations

import pytest

from elastic.driver.commandline.options.script_flags import INSTALLED, ScriptFlags

PARSERS = {
    "argparse": "import argparse\np = argparse.ArgumentParser()\np.add_argument('--journal')\n",
    "underscore": "p.add_argument(\n    '-j', \"--checkpoint_dir\")\n",
    "abbreviated": "p.add_argument('--report-to')\n",
    "manual": "import sys\nresume = '--resume' in sys.argv\n",
    "click": "@click.option('--journal/--no-journal')\ndef main(journal): ...\n",
    "typer": "def main(journal: str = typer.Option(...)): ...\n",
    "absl": "flags.DEFINE_string('journal', None, 'text')\n",
    "dataclass": "@dataclass\nclass Options:\n    journal: str = ''\n",
}


def flags_of(*command: str, module: bool = False) -> ScriptFlags:
    return ScriptFlags(command, module=module, path="/usr/bin:/bin")


@pytest.mark.parametrize(
    ("parser", "flag"),
    [
        ("argparse", "--journal"),
        ("underscore", "--checkpoint-dir"),
        ("abbreviated", "--report"),
        ("manual", "--resume"),
        *((name, "--journal") for name in ("click", "typer", "absl", "dataclass")),
    ],
)
def test_flag_when_the_script_parses_the_flag_then_is_found(parser, flag, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(PARSERS[parser])
    found = flags_of("python", "-u", "-X", "dev", str(script))
    assert found.known and found.defines(flag) and not found.defines("--min-np")


@pytest.mark.parametrize(
    "text",
    ["print(1)\n", "p.add_argument('--lr')  # see elasticrun --journal\n", "journal: 'x' (\n"],
    ids=["no parser", "comment", "syntax error"],
)
def test_flag_when_the_script_does_not_parse_the_flag_then_is_not_found(text, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(text)
    found = flags_of(str(script))
    assert found.known and found.defines("--journal") == text.startswith("journal")


@pytest.mark.parametrize(
    "imports",
    [
        "from options import parse\n",
        "import pack.options\n",
        "from pack import options as o\n",
        "from pack.deep import run\n",  # which imports pack.options relatively
    ],
)
def test_flag_when_an_imported_module_parses_the_flag_then_is_found(imports, tmp_path):
    deep = tmp_path / "pack" / "deep"
    deep.mkdir(parents=True)
    (tmp_path / "options.py").write_text(PARSERS["argparse"])
    (tmp_path / "pack" / "__init__.py").write_text("")
    (tmp_path / "pack" / "options.py").write_text(PARSERS["argparse"])
    (deep / "__init__.py").write_text("from ..options import parse\n\ndef run(): ...\n")
    (tmp_path / "train.py").write_text(imports + "import torch, sys\nsys.argv\n")
    assert flags_of(str(tmp_path / "train.py")).defines("--journal")
    assert not flags_of(str(tmp_path / "train.py")).defines("--resume")


def test_flag_when_an_installed_package_parses_the_flag_then_few_of_its_modules_are_read(
    tmp_path, monkeypatch
):
    package = tmp_path / "site-packages" / "pack"
    package.mkdir(parents=True)
    monkeypatch.syspath_prepend(package.parent)
    (package / "__init__.py").write_text("from .cli import main\n")
    (package / "cli.py").write_text(PARSERS["argparse"] + "from . import m0\n")
    for number in range(2 * INSTALLED):
        (package / f"m{number}.py").write_text(f"from . import m{number + 1}\n")
    (package / f"m{2 * INSTALLED}.py").write_text("p.add_argument('--resume')\n")
    (tmp_path / "train.py").write_text("from pack import main\n")
    found = flags_of(str(tmp_path / "train.py"))
    assert found.defines("--journal") and not found.defines("--resume")


def test_flag_when_a_module_is_run_then_its_source_is_read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "__main__.py").write_text(PARSERS["argparse"])
    assert flags_of("pack", module=True).defines("--journal")
    assert flags_of("python3", "-m", "pack").defines("--journal")
    assert flags_of("python", "-c", PARSERS["manual"]).defines("--resume")


@pytest.mark.parametrize(
    "text", [None, "from transformers import HfArgumentParser\n", "import tyro\n"]
)
def test_flags_when_absent_from_the_source_then_are_unknown(text, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(text or "")
    assert not flags_of("sleep" if text is None else str(script), "1").known
    assert not flags_of().known and not flags_of("nosuchmodule", module=True).known
