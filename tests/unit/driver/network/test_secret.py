"""Secret of a job: its source, its rejection, and that no error contains it."""

from __future__ import annotations

import os
import stat

import pytest

from elastic.driver.launch.worker_environment import worker_environment
from elastic.driver.network.secret import derived, make_secret_file, read_secret
from elastic.errors import Invalid
from elastic.protocol.messages import Address, Place, Worker
from harness.golden import raises

HEX = "0123456789abcdef" * 4


def written(path, text=HEX + "\n", mode=0o600) -> str:
    path.write_text(text)
    path.chmod(mode)
    return str(path)


def test_new_file_is_private_and_can_be_read_back(tmp_path):
    path = str(tmp_path / "secret")
    before = os.umask(0)
    try:
        make_secret_file(path)
    finally:
        os.umask(before)
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    secret = read_secret(path, {})
    assert secret is not None and len(secret) == 32
    make_secret_file(path + "2")
    assert read_secret(path + "2", {}) != secret


def test_existing_file_is_unchanged(tmp_path):
    path = written(tmp_path / "secret")
    with raises(Invalid):
        make_secret_file(path)
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "nowhere")
    with raises(Invalid):
        make_secret_file(str(link))
    assert read_secret(path, {}) == bytes.fromhex(HEX)
    assert not (tmp_path / "nowhere").exists()
    with raises(Invalid):
        make_secret_file(str(tmp_path / "no" / "folder"))


def test_sources_of_the_secret(tmp_path):
    path = written(tmp_path / "secret")
    other = {"ELASTIC_JOB_SECRET": "ff" * 32}
    assert read_secret(None, {}) is None
    assert read_secret(None, {"ELASTIC_JOB_SECRET": "", "ELASTIC_SECRET_FILE": ""}) is None
    assert read_secret(None, other) == b"\xff" * 32
    assert read_secret(None, {"ELASTIC_SECRET_FILE": path}) == bytes.fromhex(HEX)
    assert read_secret(path, other) == bytes.fromhex(HEX)  # the flag takes precedence
    with raises(Invalid):
        read_secret(None, {"ELASTIC_SECRET_FILE": path, **other})


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o644, 0o601, 0o444])
def test_file_accessible_to_other_users_is_rejected(tmp_path, mode):
    with pytest.raises(Invalid, match=f"mode {mode:o}.*chmod 600"):
        read_secret(written(tmp_path / "secret", mode=mode), {})


@pytest.mark.skipif(os.geteuid() != 0, reason="makes a file of root's")
def test_file_mounted_by_kubernetes_may_be_readable_by_its_group(tmp_path):
    path = written(tmp_path / "secret", mode=0o440)
    assert read_secret(path, {}) == bytes.fromhex(HEX)
    os.chown(path, os.geteuid() + 1000, 1000)
    with raises(Invalid):
        read_secret(path, {})


@pytest.mark.parametrize(
    "text", ["", HEX[:-2], HEX + "0", "g" * 64, HEX[:32] + " " + HEX[32:], "é"]
)
def test_invalid_secret_is_rejected_without_repeating_the_secret(tmp_path, text):
    for given in (
        lambda: read_secret(written(tmp_path / "secret", text), {}),
        lambda: read_secret(None, {"ELASTIC_JOB_SECRET": text or "?"}),
    ):
        with raises(Invalid) as refusal:
            given()
        assert HEX[:16] not in str(refusal.value)


def test_path_that_is_not_a_file_is_rejected_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe", 0o600)
    with raises(Invalid):
        read_secret(str(tmp_path / "pipe"), {})
    with raises(Invalid):
        read_secret(str(tmp_path), {})
    with raises(Invalid):
        read_secret(str(tmp_path / "missing"), {})


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_file_of_another_user_is_rejected(tmp_path):
    path = written(tmp_path / "secret")
    os.chown(path, 12345, -1)
    with raises(Invalid):
        read_secret(path, {})


def test_derived_keys_differ_by_purpose():
    secret = bytes.fromhex(HEX)
    keys = {secret, derived(secret, "workers"), derived(secret, "else"), derived(b"x" * 32, "else")}
    assert len(keys) == 4
    assert derived(secret, "workers") == derived(secret, "workers")


def test_workers_do_not_inherit_the_jobs_secret():
    inherited = {
        "ELASTIC_JOB_SECRET": HEX,
        "ELASTIC_SECRET_FILE": "/secret",
        "ELASTIC_ETCD_PASSWORD": "password",
        "PATH": "/bin",
    }
    env = worker_environment(
        inherited,
        worker=Worker("h", 0),
        place=Place(0, 1, 0, 1, 0, 1),
        driver=Address("127.0.0.1", 1),
        secret="ee",
        bind="127.0.0.1",
        elastic=True,
        wait_timeout_s=1,
        threads=1,
    )
    assert env["PATH"] == "/bin" and env["ELASTIC_SECRET"] == "ee"
    assert not {"ELASTIC_JOB_SECRET", "ELASTIC_SECRET_FILE", "ELASTIC_ETCD_PASSWORD"} & env.keys()
    assert HEX not in str(env)
