"""Keyword arguments of the functions that start jobs are made from the declarations of the flags."""

from __future__ import annotations

import inspect
import json
import sys
from typing import Any

import numpy
import pytest

import elastic
import elastic.ray
from elastic.driver.commandline.options import flags
from elastic.driver.commandline.options.argument_parser import FUNCTIONS, LAUNCH, RAY
from elastic.driver.commandline.options.keyword_arguments import (
    flag_of,
    keywords,
    type_of,
    words_of,
)
from elastic.driver.settings import FLAGS
from elastic.errors import Invalid
from elastic.launcher.option_types import LaunchOptions, RayOptions
from harness.golden import raises
from harness.program import stdout_of
from harness.sources import ROOT


def test_keyword_arguments_become_flags():
    given = {"np": 2, "checkpoint_dir": "/a b", "begin_from": None, "standbys": 0}
    given |= {"fresh": True, "summary": False, "cooldown_range": (1, 60)}
    assert words_of(LAUNCH, given) == [
        *("--num-proc=2", "--checkpoint-dir=/a b", "--standbys=0", "--fresh"),
        *("--blacklist-cooldown-range", "1", "60"),
    ]


@pytest.mark.parametrize(
    "pair", [(1, 60), [1, 60.0], ("1", "60"), numpy.array([1, 60]), numpy.array([1, 60], "f4")]
)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_range_has_any_two_numbers(function, pair):
    words = words_of(function, {"cooldown_range": pair})
    assert flags.parse(words).cooldown_range == [1.0, 60.0]


@pytest.mark.parametrize(
    "pair", [5, "15", (), (1,), (1, 2, 3), (5, 1), (0, 1), (True, 5), (1, None)]
)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_range_needs_two_positive_numbers_in_order(function, pair):
    with pytest.raises(Invalid):
        words_of(function, {"cooldown_range": pair})


@pytest.mark.parametrize("function", FUNCTIONS)
def test_flag_of_each_keyword_sets_its_option(function):
    for option in keywords(function).values():
        assert flags.parser()._option_string_actions[flag_of(option)].dest == option.name


def test_settings_are_named_after_their_flags():
    for option, use in flags.declared():
        if use.setting in FLAGS:
            assert FLAGS[use.setting] == flag_of(option)


@pytest.mark.parametrize(
    ("call", "function", "typed"),
    [
        (elastic.launch, LAUNCH, LaunchOptions),
        (elastic.ray.run, RAY, RayOptions),
        (elastic.ray.Executor, RAY, RayOptions),
    ],
)
def test_signature_and_types_have_the_keywords_with_their_defaults(call, function, typed):
    shown = inspect.signature(call).parameters
    for name, option in keywords(function).items():
        assert (shown[name].default, shown[name].annotation) == (option.default, type_of(option))
        assert shown[name].kind is inspect.Parameter.KEYWORD_ONLY
        assert option.default in (None, False)  # as option_types.py says
    assert typed.__annotations__.keys() == keywords(function).keys()


@pytest.mark.parametrize("name", ["standby", "slot_attempts"])
def test_unknown_keyword_is_a_type_error(name):
    options: dict[str, Any] = {name: 1}
    with raises(TypeError):
        elastic.launch(print, np=1, **options)
    with raises(TypeError):
        elastic.ray.run(print, num_workers=1, **options)
    with raises(TypeError):
        elastic.ray.Executor(1, **options)


@pytest.mark.parametrize("given", [{"np": 0}, {"slots_per_host": True}, {"start_timeout": "soon"}])
def test_launch_checks_its_options(given):
    with raises(Invalid):
        elastic.launch(print, **given)


# Adds one declaration to a section of the flags, as an edit of the file would, and looks for it.
MADE_UP = """
import importlib.util, inspect, json, pathlib, sys, tempfile
import elastic.driver.commandline as package

spec = importlib.util.find_spec("elastic.driver.commandline.options.flags")
source = pathlib.Path(spec.origin).read_text()
before, section, after = source.partition("    reset_limit: int | None = flag(")
assert section
declaration = '''\
    settling: float | None = flag(
        "--made-up", "S", "A made-up option.", seconds, variable="MADE_UP", keys=("made.up",),
        use=Use(functions=FUNCTIONS, keyword="made_up", setting="settle_s"),
    )
'''
flags = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = package.flags = flags
exec(compile(before + declaration + section + after, spec.origin, "exec"), vars(flags))

from elastic.driver.commandline.options.argument_parser import FUNCTIONS
import elastic, elastic.ray
from elastic.driver.commandline import cli
from elastic.driver.commandline.options.keyword_arguments import words_of
sys.path.insert(0, "docs/site")
import reference

def setting(*words, **environ):
    made = cli.make_job(cli.read_options(["-np", "1", *words, "true"], environ), {"PATH": "/bin:/usr/bin"})
    return made.settings.settle_s

with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
    print("made: {up: 3}", file=file, flush=True)
    found = {
        "flag": setting("--made-up", "1"),
        "variable": setting(MADE_UP="2"),
        "file": setting("--config-file", file.name),
        **{name: setting(*words_of(name, {"made_up": 4})) for name in FUNCTIONS},
    }
shown = (elastic.launch, elastic.ray.run, elastic.ray.Executor)
found["signatures"] = [str(inspect.signature(each).parameters["made_up"]) for each in shown]
found["help"] = "--made-up" in flags.parser().format_help()
found["pages"] = [name for name, make in reference.FILES.items() if "made-up" in make() or "made_up" in make()]
elastic.ray.Executor(1, made_up=5)
print(json.dumps(found))
"""


def test_one_declaration_adds_an_option_to_flags_variables_files_and_documentation():
    made = stdout_of(sys.executable, "-c", MADE_UP, cwd=ROOT, timeout=240)
    assert json.loads(made) == {
        "flag": 1,
        "variable": 2,
        "file": 3,
        LAUNCH: 4,
        RAY: 4,
        "signatures": ["made_up: 'float | None' = None"] * 3,
        "help": True,
        "pages": [
            "docs/reference/commands.md",
            "docs/reference/variables.md",
            "elastic/launcher/option_types.py",
        ],
    }
