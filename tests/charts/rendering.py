"""Output of helm for the chart: objects, or the sentence of its refusal."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts" / "hvd-elastic"
BASE = ROOT / "charts" / "kustomize" / "base"
JOB = {"job": {"command": ["python", "train.py"]}}
RENDER_S = 60

Json = dict[str, Any]


class Refused(Exception):
    """Output of helm."""


def merged(*values: Json) -> Json:
    """Merge dicts; later values win."""
    result: Json = {}
    for each in values:
        for key, value in each.items():
            old = result.get(key)
            if isinstance(old, dict) and isinstance(value, dict):
                value = merged(old, value)
            result[key] = value
    return result


class Objects:
    """Index objects by kind and name."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.all: list[Json] = [each for each in yaml.load_all(text, yaml.CSafeLoader) if each]
        self._by_name = {(each["kind"], each["metadata"]["name"]): each for each in self.all}
        assert len(self._by_name) == len(self.all), "two objects have one name"

    def __contains__(self, which: tuple[str, str]) -> bool:
        return which in self._by_name

    def __getitem__(self, which: tuple[str, str]) -> Json:
        return self._by_name[which]

    def kinds(self) -> set[str]:
        return {each["kind"] for each in self.all}

    def pods(self) -> tuple[Json, Json]:
        """Return the templates of the driver's pod and the workers'."""
        jobs = self.jobs() or [
            next(each for each in self.all if each["kind"] == kind)
            for kind in ("Job", "StatefulSet")
        ]
        driver, worker = (each["spec"]["template"] for each in jobs)
        return driver, worker

    def jobs(self) -> list[Json]:
        """Return the Jobs of a JobSet, as its controller creates them, without names and indices."""
        sets = [each for each in self.all if each["kind"] == "JobSet"]
        parts = [part for each in sets for part in each["spec"]["replicatedJobs"]]
        return [
            {"apiVersion": "batch/v1", "kind": "Job", **part["template"]}
            | {"metadata": {"name": part["name"], **part["template"]["metadata"]}}
            for part in parts
        ]

    def containers(self) -> tuple[Json, Json]:
        driver, worker = (pod["spec"]["containers"][0] for pod in self.pods())
        return driver, worker

    def arguments(self) -> tuple[list[str], list[str]]:
        driver, worker = (container["args"] for container in self.containers())
        return driver, worker


class Helm:
    def __init__(self, program: str) -> None:
        self.program = program

    def render(self, *values: Json, release: str = "r", version: str = "1.37") -> Objects:
        """Render with a training command and these values. Raises Refused."""
        return Objects(self.text(merged(JOB, *values), release=release, version=version))

    def text(self, values: Json, *, release: str = "r", version: str = "1.37") -> str:
        """Render with these values alone. Raises Refused."""
        command = [
            self.program,
            "template",
            release,
            str(CHART),
            "--kube-version",
            version,
            "-f",
            "-",
        ]
        done = subprocess.run(
            command, input=json.dumps(values), capture_output=True, text=True, timeout=RENDER_S
        )
        if done.returncode:
            raise Refused(done.stderr)
        return done.stdout

    def render_all(self, each: Iterable[Sequence[Json]], *, version: str) -> list[Objects]:
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            return [*pool.map(lambda values: self.render(*values, version=version), each)]


def everywhere(value: Any) -> Iterator[Any]:
    """Iterate over each dict, list and leaf in it."""
    yield value
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for part in parts:
        yield from everywhere(part)
