"""Checks of elasticrun doctor: each missing requirement is reported with a remedy."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import os
import warnings
from pathlib import Path
from typing import Any

import msgspec
import pytest

from elastic import conflicting_packages
from elastic.driver.commandline import cli
from elastic.driver.commandline.setup import host_facts
from elastic.driver.commandline.setup.check_build import Build
from elastic.driver.commandline.setup.host_checks import HostFacts, Level, checks
from elastic.driver.commandline.setup.host_facts import foreign_files
from elastic.version import __version__

BUILD = Build(torch="2.13", gloo=True, nccl=True, gpus=2, nccl_version="2.28.9")
HOST = HostFacts(
    version="1.0",
    python="3.11 at /usr/bin/python3",
    at=100.0,
    build=BUILD,
    driver_gpus=2,
    port_trouble="",
    addresses=["10.0.0.5 (eth0)"],
    shm_bytes=8 << 30,
    shm_free=8 << 30,
    foreign=[],
    health_code=0,
    health="cpu: all results are right",
    others=[],
)


def levels(host: HostFacts, **about: Any) -> dict[str, Level]:
    found = checks(host, **{"version": "1.0", "several": True, "ahead_s": 0.0, **about})
    for each in found:
        assert each.found and bool(each.do) is (each.level is not Level.OK), each
    return {each.what: each.level for each in found if each.level is not Level.OK}


def build(**changes: Any) -> dict[str, Any]:
    return {"build": dataclasses.replace(BUILD, **changes)}


def test_complete_host_passes():
    assert levels(HOST) == {}
    assert levels(HOST, ahead_s=None) == {}


@pytest.mark.parametrize(
    ("changes", "about", "what", "level"),
    [
        ({"version": "0.9"}, {}, "version", Level.FAIL),
        ({"health_code": 3, "health": "cpu: wrong"}, {}, "health", Level.FAIL),
        (build(gloo=False), {}, "torch", Level.FAIL),
        (build(shared="the C++ library was not built"), {}, "library", Level.WARN),
        (build(gpus=1), {}, "GPUs, NCCL", Level.WARN),
        (build(nccl=False), {}, "GPUs, NCCL", Level.FAIL),
        ({"port_trouble": "Connection refused"}, {}, "ports", Level.FAIL),
        ({"addresses": []}, {}, "network", Level.FAIL),
        ({"shm_bytes": None}, {}, "shared memory", Level.WARN),
        ({"shm_free": 64 << 20}, {}, "shared memory", Level.WARN),
        ({}, {"ahead_s": -3.0}, "clock", Level.WARN),
        ({"others": ["Horovod is here too"]}, {}, "packages", Level.WARN),
        ({"foreign": ["/site/elastic/elastic.py"]}, {}, "packages", Level.FAIL),
    ],
)
def test_missing_requirement_is_reported(changes, about, what, level):
    assert levels(msgspec.structs.replace(HOST, **changes), **about) == {what: level}


def test_single_host_needs_no_network_and_a_host_without_gpus_no_nccl():
    assert levels(msgspec.structs.replace(HOST, addresses=[]), several=False) == {}
    bare = msgspec.structs.replace(HOST, driver_gpus=0, **build(gpus=0, nccl=False))
    assert levels(bare) == {}


def test_checks_that_need_torch_are_skipped_without_torch():
    broken = msgspec.structs.replace(HOST, driver_gpus=0, build=Build(trouble="no torch"))
    assert levels(broken) == {"torch": Level.FAIL, "library": Level.WARN}


# ---- the command


@pytest.fixture
def record_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        host_facts, "facts", lambda: msgspec.structs.replace(HOST, version=__version__)
    )


@pytest.mark.usefixtures("record_queries")
def test_output_has_a_line_for_each_check(capsys):
    assert cli.main(["doctor"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert len(out) <= 24 and sum(line.split()[0] == "ok" for line in out) >= 8


@pytest.mark.usefixtures("record_queries")
def test_unreachable_host_fails_and_remaining_hosts_are_checked(capsys, tmp_path, monkeypatch):
    (tmp_path / "ssh").write_text(
        "#!/bin/sh\necho 'ssh: connect to host x port 22: refused' >&2\nexit 255\n"
    )
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert cli.main(["doctor", "-H", "localhost,192.0.2.77", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert [each["what"] for each in found["192.0.2.77"] if each["level"] == "fail"] == ["ssh"]
    assert all(each["level"] == "ok" for each in found["this host"])


# ---- files of other packages


def installed(site: Path) -> None:
    """Our package, as installed by pip."""
    rows = []
    for name, text in {
        "elastic/__init__.py": "ours\n",
        "elastic/run.py": "",
        "horovod/__init__.py": "",
    }.items():
        path = site / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        digest = (
            base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        )
        rows.append(f"{name},sha256={digest},{len(text)}")
    info = site / "ours_of_this_test-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: ours-of-this-test\nVersion: 1.0\n")
    (info / "RECORD").write_text(
        "\n".join([*rows, f"{info.name}/METADATA,,", f"{info.name}/RECORD,,"]) + "\n"
    )


def test_foreign_files_in_our_folders_are_found(tmp_path, monkeypatch):
    installed(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "elastic/__pycache__").mkdir()
    (tmp_path / "elastic/__pycache__/run.cpython-311.pyc").write_text("")
    assert foreign_files("ours-of-this-test") == []
    (tmp_path / "elastic/cli").mkdir()
    (tmp_path / "elastic/cli/elastic.py").write_text("")
    (tmp_path / "elastic/__init__.py").write_text("theirs\n")
    found = [str(Path(path).relative_to(tmp_path)) for path in foreign_files("ours-of-this-test")]
    assert found == ["elastic/__init__.py", "elastic/cli/elastic.py"]
    assert foreign_files("not-installed-at-all") == []


@pytest.mark.parametrize(
    ("package", "mark"), [("elastic", "elastic.py"), ("horovod", "common/basics.py")]
)
def test_import_beside_another_horovod_warns_once(tmp_path, monkeypatch, package, mark):
    monkeypatch.delenv("ELASTIC_WORKER", raising=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        conflicting_packages.warn_of_conflicts(package, str(tmp_path))
    (tmp_path / mark).parent.mkdir(exist_ok=True)
    (tmp_path / mark).write_text("")
    with pytest.warns(RuntimeWarning) as warned:
        conflicting_packages.warn_of_conflicts(package, str(tmp_path))
    assert len(warned) == 1
    monkeypatch.setenv("ELASTIC_WORKER", "h:0#1")
    conflicting_packages.warn_of_conflicts(package, str(tmp_path))


def test_package_contains_no_marks_of_conflicting_packages():
    root = Path(__file__).parents[5]
    marks = [
        root / package / mark for package, of in conflicting_packages.MARKS.items() for mark in of
    ]
    assert len(marks) >= 6 and not [mark for mark in marks if mark.exists()]
