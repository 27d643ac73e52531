"""Where a worker that runs a function finds its call, and where an agent finds its driver: files, read anew."""

from __future__ import annotations

import asyncio

import cloudpickle
import pytest

from elastic import run_function, runtime
from elastic.driver.agent_process import _at_addresses, read_bootstrap
from elastic.errors import Invalid


@pytest.fixture
def sent(monkeypatch):
    values = []
    monkeypatch.setattr(runtime, "send_result", lambda blob: values.append(cloudpickle.loads(blob)))
    return values


def test_the_call_is_in_the_file_that_is_named_or_else_in_that_of_the_environment(
    tmp_path, monkeypatch, sent
):
    for name in ("one", "two"):
        (tmp_path / name).write_bytes(cloudpickle.dumps((str.upper, (name,), {})))
    monkeypatch.setenv("ELASTIC_CALL", str(tmp_path / "two"))
    run_function.main(str(tmp_path / "one"))
    run_function.main()
    assert sent == ["ONE", "TWO"]


def test_without_a_call_it_says_so(monkeypatch, sent):
    monkeypatch.delenv("ELASTIC_CALL", raising=False)
    with pytest.raises(Invalid, match="no call to run"):
        run_function.main()


def test_an_agent_reads_its_drivers_addresses_anew_at_each_try(tmp_path):
    file = tmp_path / "drivers"

    async def talk() -> None:
        find = _at_addresses(["127.0.0.1:1"], str(file))
        assert await find() == [("127.0.0.1", 1)]
        file.write_text("127.0.0.1:2\n127.0.0.2:3\n")
        assert await find() == [("127.0.0.1", 2), ("127.0.0.2", 3)]
        file.write_text("")
        assert await find() == [("127.0.0.1", 1)]

    asyncio.run(talk())


def test_a_bootstrap_may_name_the_file_alone():
    secret = "5e" * 32
    line = f'{{"job": "j", "host": "h", "secret": "{secret}", "drivers_file": "/d"}}'
    assert read_bootstrap(line.encode()).drivers_file == "/d"
    with pytest.raises(Invalid, match="nothing of where the driver is"):
        read_bootstrap(line.replace("/d", "").encode())
