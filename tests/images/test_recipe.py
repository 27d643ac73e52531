"""`images/` without a build: its files match the package, the wheel and elasticrun's flags."""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
import sys
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import yaml

from elastic.driver.commandline.agent_cli import AgentOptions, agent_parser
from elastic.driver.commandline.options.flags import Options, parse
from elastic.version import __version__
from images.conftest import IMAGES, ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
RECIPE = (IMAGES / "Containerfile").read_text()
# What Docker Compose knows of a service, as far as compose.yaml says it; its schema is not at hand.
KNOWN = {
    *("cap_drop", "command", "environment", "healthcheck", "image", "networks", "read_only"),
    *("security_opt", "shm_size", "stop_grace_period", "tmpfs", "user", "volumes"),
}


def instructions() -> list[str]:
    """Without comments, each in one line."""
    lines = [line for line in RECIPE.splitlines() if not line.startswith("#")]
    return [line for line in "\n".join(lines).replace("\\\n", " ").splitlines() if line]


def from_the_checkout() -> Iterator[str]:
    """Files that the recipe names."""
    for line in instructions():
        words = line.split()
        if words[0] == "COPY" and not words[1].startswith("--from"):
            yield from (word for word in words[1:-1] if word != ".")
        yield from re.findall(r"--mount=\S*source=([^,]+)", line)


def test_no_build_step_mounts_a_previous_stage() -> None:
    """buildah would take it from its cache although that stage has changed: an image of old sources."""
    assert not [line for line in instructions() if re.search(r"--mount=\S*from=", line)]


def sent(path: str) -> bool:
    """Whether a build gets this file: of the lines that match it, or a folder that it is in, the last one decides."""
    found = True
    parts = path.split("/")
    heads = ["/".join(parts[:count]) for count in range(1, len(parts) + 1)]
    for line in (IMAGES / "Containerfile.dockerignore").read_text().splitlines():
        pattern = line.removeprefix("!").removeprefix("**/")
        if line.startswith("#") or not line:
            continue
        assert "/" not in pattern or "*" not in pattern, "this test knows no such pattern"
        tried = parts if "**/" in line else heads if "/" in pattern else heads[:1]
        if any(fnmatchcase(each, pattern) for each in tried):
            found = line.startswith("!")
    return found


def walk(folder: str) -> Iterator[str]:
    """Its files, those behind links under their own paths."""
    for here, folders, files in os.walk(ROOT / folder):
        for name in [each for each in folders if Path(here, each).is_symlink()]:
            yield from walk(str(Path(here, name).resolve().relative_to(ROOT)))
        yield from (str(Path(here, name).relative_to(ROOT)) for name in files)


def test_build_context_contains_all_inputs_of_wheel_and_recipe() -> None:
    about = PROJECT["project"]
    needed = {"pyproject.toml", about["readme"], *about["license-files"], *from_the_checkout()}
    for folder in (*PROJECT["tool"]["scikit-build"]["wheel"]["packages"], "native"):
        needed |= {*walk(folder)}
    generated = re.compile(r"__pycache__|\.pyc$|libelastic_native\.so")
    wanted = {path for path in needed if not generated.search(path)}
    assert {"driver/events.py", "charts/hvd-elastic/Chart.yaml", "images/trim.sh"} <= wanted
    assert [path for path in sorted(wanted) if not sent(path)] == []


@pytest.mark.parametrize(
    "path",
    [
        *(
            ".venv/bin/python",
            ".git/config",
            "tests/conftest.py",
            "docs/kubernetes.md",
            "job.secret",
        ),
        *("driver/__pycache__/events.pyc", "images/build.sh"),
        "elastic/collectives/shared_memory/libelastic_native.so",
    ],
)
def test_build_context_excludes_other_files(path: str) -> None:
    assert not sent(path)


def test_recipe_names_the_version_and_extras_of_the_package() -> None:
    arguments = dict(re.findall(r"^ARG (\w+)=(.*)$", RECIPE, re.MULTILINE))
    assert arguments["VERSION"] == __version__
    known = PROJECT["project"]["optional-dependencies"]
    script = (IMAGES / "build.sh").read_text()
    extras = [arguments["EXTRAS"], *re.findall(r"extras=([a-z,]+) ;;", script)]
    assert len(extras) == 3
    assert {name for each in extras for name in each.split(",")} <= known.keys()
    assert "TORCH_INDEX" in arguments and "BASE" in arguments
    named = re.findall(r"--build-arg (\w+)=", (IMAGES / "README.md").read_text())
    assert {*named} <= arguments.keys() and len(named) == 3


# ---- compose.yaml


def services() -> dict[str, dict[str, Any]]:
    text = (IMAGES / "compose.yaml").read_text()
    found: dict[str, dict[str, Any]] = yaml.safe_load(
        re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text)  # defaults
    )["services"]
    return found


def command(service: str) -> list[str]:
    """Of elasticrun, which a shell may start; ``$$`` is a dollar there."""
    words = shlex.split(services()[service]["command"])
    if words[:2] == ["sh", "-c"]:
        text = words[2].replace('"$$(hostname -i)"', "10.0.0.7")
        assert "$" not in text and text.startswith("exec ")
        words = shlex.split(text.removeprefix("exec "))
    return words


def test_the_hosts_of_compose_are_as_strict_as_pods_and_find_each_other() -> None:
    assert [*services()] == ["driver", "agent-1", "agent-2", "agent-3"]
    driver, *agents = (command(service) for service in services())
    options: Options = parse(driver[1:])
    assert driver[0] == "elasticrun" and options.command[:2] == ["python", "demo.py"]
    assert int(options.command[2]) > 0
    for agent in agents:
        assert agent[:2] == ["elasticrun", "agent"]
        given = agent_parser().parse_args(agent[2:], namespace=AgentOptions())
        assert vars(given).keys() <= {field.name for field in dataclasses.fields(given)}, "unknown"
        assert given.job_name == options.job_name
        assert given.drivers == [f"driver:{options.driver_port}"]
    for name, service in services().items():
        assert service.keys() <= KNOWN
        assert service["read_only"] and service["tmpfs"] == ["/tmp"], name
        assert service["cap_drop"] == ["ALL"] and "no-new-privileges" in service["security_opt"]
        assert str(service["user"]) not in ("0", "root")
        assert service["environment"]["ELASTIC_SECRET_FILE"] == "/run/job.secret"
        if name != "driver":
            assert service["networks"]["default"]["aliases"] == [options.kubernetes_service]
            ready = re.findall(r"--ready-file (\S+)", service["command"])
            assert service["healthcheck"]["test"] == ["CMD", "test", "-e", *ready]
