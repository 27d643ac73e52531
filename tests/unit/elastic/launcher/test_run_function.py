"""A worker's function call, and an agent's driver: files, read again each time."""

from __future__ import annotations

import os
import random
import threading

import cloudpickle
import pytest

from elastic.driver.agents.agent_main import _at_addresses, read_bootstrap
from elastic.driver.job.start import Outcome
from elastic.errors import Invalid, JobFailed
from elastic.launcher import launch_function, run_function
from elastic.protocol.messages import RESULT_LIMIT
from elastic.runtime import lifecycle
from harness.golden import raises


@pytest.fixture
def sent(monkeypatch):
    values = []
    monkeypatch.setattr(
        lifecycle, "send_result", lambda blob: values.append(cloudpickle.loads(blob))
    )
    return values


def test_call_is_read_from_the_given_file_or_the_file_of_the_environment(
    tmp_path, monkeypatch, sent
):
    for name in ("one", "two"):
        (tmp_path / name).write_bytes(cloudpickle.dumps((str.upper, (name,), {})))
    monkeypatch.setenv("ELASTIC_CALL", str(tmp_path / "two"))
    run_function.main(str(tmp_path / "one"))
    run_function.main()
    assert sent == ["ONE", "TWO"]


def test_call_is_passed_in_the_environment_without_a_shared_file(tmp_path, monkeypatch, sent):
    text = random.Random(0).randbytes(300_000).hex()[:500_000]
    parts = run_function.carried(cloudpickle.dumps((str.upper, (text,), {})))
    assert len(parts) > 1 and max(map(len, parts.values())) < 128 * 1024
    for name, part in parts.items():
        monkeypatch.setenv(name, part)
    run_function.main(str(tmp_path / "not here"))
    assert sent == [text.upper()]
    assert not [name for name in os.environ if name in parts], "children inherit none of it"
    assert run_function.carried(bytes(run_function.CARRIED_LIMIT + 1)) == {}
    with raises(Invalid):
        run_function.main(str(tmp_path / "not here"))


def test_a_launched_job_forwards_the_call_to_other_hosts(monkeypatch):
    begun = []

    async def start(job):
        begun.append(job)
        return Outcome(0, "", [])

    monkeypatch.setattr("elastic.driver.job.start.start", start)
    launch_function.launch(str.upper, ("a",), np=2, hosts="192.0.2.77:1,192.0.2.78:1")
    (job,) = begun
    forwarded = job.fleet.forwarded
    assert run_function._call("", forwarded) == cloudpickle.dumps((str.upper, ("a",), {}))
    assert "ELASTIC_CALL_PART_0" not in job.environ


def test_a_missing_call_is_an_error(monkeypatch, sent):
    monkeypatch.delenv("ELASTIC_CALL", raising=False)
    with raises(Invalid):
        run_function.main()


async def test_an_agent_reads_its_drivers_addresses_again_at_each_attempt(tmp_path):
    file = tmp_path / "drivers"
    find = _at_addresses(["127.0.0.1:1"], str(file))
    assert await find() == [("127.0.0.1", 1)]
    file.write_text("127.0.0.1:2\n127.0.0.2:3\n")
    assert await find() == [("127.0.0.1", 2), ("127.0.0.2", 3)]
    file.write_text("")
    assert await find() == [("127.0.0.1", 1)]


def test_bootstrap_may_contain_only_the_drivers_file():
    secret = "5e" * 32
    line = f'{{"job": "j", "host": "h", "secret": "{secret}", "drivers_file": "/d"}}'
    assert read_bootstrap(line.encode()).drivers_file == "/d"
    with raises(Invalid):
        read_bootstrap(line.replace("/d", "").encode())


def test_value_that_cannot_be_sent_raises_an_error(monkeypatch, sent, tmp_path):
    def locked() -> object:
        return threading.Lock()

    def large() -> bytes:
        return bytes(RESULT_LIMIT)

    call = tmp_path / "call"
    call.write_bytes(cloudpickle.dumps((locked, (), {})))
    with raises(TypeError):
        run_function.main(str(call))
    call.write_bytes(cloudpickle.dumps((large, (), {})))
    with raises(ValueError):
        run_function.main(str(call))
    assert sent == []


def test_values_are_ordered_by_rank_and_missing_ones_reported():
    one = cloudpickle.dumps("one")
    assert launch_function.values_of([cloudpickle.dumps(None), one]) == [None, "one"]
    with raises(JobFailed):
        launch_function.values_of([None, one])
    with pytest.raises(JobFailed, match="ranks 0, 2 of 3"):
        launch_function.values_of([None, one, None])
