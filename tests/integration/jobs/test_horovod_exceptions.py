"""Scripts that catch or raise Horovod's exceptions: the exceptions, and the fate of their steps."""

from __future__ import annotations

import re

import pytest

from harness import wording
from harness.history import RETURN, SCRIPTS, STAY_AWAY, sizes

pytestmark = pytest.mark.forked

CATCHING = ["python", SCRIPTS / "horovod_exceptions.py"]
OWN_LOOP = ["python", SCRIPTS / "horovod_own_loop.py"]


def said(running, what: str) -> list[str]:
    """Each ``slot: what follows``, sorted."""
    found = (re.search(rf"said slot=(\d) {what} ?(.*)", line) for line in running.lines)
    return sorted(f"{m[1]}: {m[2]}" for m in found if m)


def test_horovod_exceptions_raised_by_a_script_trigger_recovery(job):
    """Slot 2 dies at step 2. At 5 and at 9 one of the others raises HostsUpdatedInterrupt: its steps since the last
    commit, after 4 and 8, stay. At 10 slot 0 raises HorovodInternalError: everybody goes back.
    """
    running = job(
        f"-np 3 --min-np 1 {STAY_AWAY}",
        CATCHING,
        env={"ELASTIC_DIGESTS": "1", "SCENES": "2:die=2 5:updated=0 9:updated=1 10:internal=0"},
    )
    running.succeed()
    assert sizes(running)[1:] == [3, 2, 2, 2, 2]
    assert said(running, "changes") == ["0: 5 False", "1: 9 False"]
    caught = said(running, "caught")
    assert [entry[0] for entry in caught] == ["0"] * 3 + ["1"] * 3
    assert all(entry.endswith("True") for entry in caught), "each is a RuntimeError"
    entered = ["0 0.0 2", "0 0.0 3", "5 5.0 2", "9 9.0 2", "9 9.0 2"]
    expected = [f"{slot}: {entry}" for slot in (0, 1) for entry in entered]
    assert said(running, "enters") == [*expected, "2: 0 0.0 3"]
    assert said(running, "ends") == ["0: trained 16.0 2", "1: trained 16.0 2"]


def test_horovod_exceptions_can_be_caught_and_raised_again_by_a_script(job):
    """A planned change is a HostsUpdatedInterrupt, and listeners hear of it before. A lost peer is a
    HorovodInternalError; a script that swallows it can commit nothing of the step that was cut short.
    """
    running = job(
        f"-np 3 --min-np 1 {RETURN}",
        CATCHING,
        env={"ELASTIC_DIGESTS": "1", "SCENES": "2:die=2 5:full=3 11:swallow=any 11:die=1"},
    )
    running.succeed()
    assert {"0: 5 False", "1: 5 False"} <= set(said(running, "changes"))
    assert {"0: 3 True", "1: 3 True"} <= set(said(running, "told"))
    assert said(running, "swallowed") == ["0: HorovodPeerLost", "2: HorovodPeerLost"]
    assert {"0: 12 True", "2: 12 True"} <= set(said(running, "caught")), "by commit()"
    assert all(entry.split()[2] == "16.0" for entry in said(running, "ends"))


@pytest.mark.parametrize("flags", ["-np 2", "-np 2 --min-np 1"])
def test_retry_loop_of_a_script_survives_an_exception_of_one_worker(job, flags):
    """It leaves by shutdown(), which interrupts the others; all reach init() again."""
    running = job(flags, OWN_LOOP)
    running.succeed()
    again = [line.partition("said ")[2] for line in running.lines if " again " in line]
    assert sorted(again) == ["0 again 4 4.0", "1 again 4 4.0"]
    assert said_at_the_end(running) == ["0 ends 12.0 2", "1 ends 12.0 2"]


def test_retry_loop_without_elastic_run_ends_when_a_worker_is_lost(job):
    """Without elastic.run a newcomer can't get the others' state: the job ends immediately, with the reason."""
    running = job("-np 2 --min-np 1", OWN_LOOP, env={"DIE": "9"})
    assert running.wait(40) in (1, 137)  # that of whose word came first
    running.wait_for("0 caught [89]")
    running.wait_for(wording.LOCALHOST_SIGNAL_SIGKILL_ELASTIC)


def said_at_the_end(running) -> list[str]:
    return sorted(line.partition("said ")[2] for line in running.lines if " ends " in line)
