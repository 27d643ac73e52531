"""Assignment of elasticrun's standard input to a worker, and jobs in which no worker can have it."""

from __future__ import annotations

import os
import pty

import pytest

from elastic.driver.commandline import cli
from elastic.driver.launch.standard_input import StandardInput, check_stdin, rank_of
from elastic.driver.settings import UNBOUNDED
from elastic.errors import Invalid
from elastic.protocol.messages import Worker

A, B, C = (Worker("h", slot, 1) for slot in range(3))
AGAIN = Worker("h", 1, 2)


def test_worker_with_the_rank_reads_standard_input():
    stdin = StandardInput(1)
    given = [stdin.receives(worker, rank, ()) for rank, worker in enumerate((A, B, C))]
    assert given == [False, True, False]


def test_no_worker_reads_standard_input_without_a_rank():
    assert not any(StandardInput(None).receives(A, rank, ()) for rank in (None, 0, 1))


def test_worker_without_a_rank_does_not_read_standard_input():
    assert not StandardInput(0).receives(A, rank_of({}), ())


def test_next_worker_of_the_slot_reads_standard_input_after_the_holder_ended():
    stdin = StandardInput(1)
    assert stdin.receives(B, 1, {A})
    assert not stdin.receives(C, 1, {A, B})
    assert stdin.receives(AGAIN, 2, {A, C})


def test_next_worker_of_the_rank_reads_standard_input_when_the_slot_is_not_used_again():
    stdin = StandardInput(1)
    assert stdin.receives(B, 1, {A})
    assert not stdin.receives(Worker("other", 0, 1), 2, {A})
    assert stdin.receives(Worker("other", 1, 1), 1, {A})


@pytest.mark.parametrize(
    ("rank", "workers", "by_agents"), [(2, 2, False), (5, 1, False), (0, 2, True)]
)
def test_job_is_rejected_when_no_worker_could_read_standard_input(rank, workers, by_agents):
    with pytest.raises(Invalid):
        check_stdin(rank, workers, by_agents=by_agents)


def test_job_is_accepted_when_a_worker_can_read_standard_input():
    check_stdin(None, 1, by_agents=True)
    check_stdin(7, UNBOUNDED, by_agents=False)


def job_of(*flags: str):
    return cli.make_job(
        cli.read_options(["-np", "2", *flags, "true"], {}), {"PATH": os.environ["PATH"]}
    )


def test_flag_and_configuration_file_name_the_rank(tmp_path):
    (tmp_path / "job.yaml").write_text("stdin:\n  rank: 1\n")
    assert job_of().stdin_rank is None
    assert job_of("--stdin", "0").stdin_rank == 0
    assert job_of("--config-file", str(tmp_path / "job.yaml")).stdin_rank == 1


@pytest.mark.parametrize(
    "flags", [["2"], ["-1"], ["x"], ["1", "-H", "localhost:1,elsewhere.invalid:1"]], ids=" ".join
)
def test_flag_is_rejected_when_no_worker_could_read_standard_input(flags):
    with pytest.raises(Invalid):
        job_of("--stdin", *flags)


def test_flag_is_rejected_for_a_command_in_the_background_of_its_terminal(monkeypatch):
    leader, terminal = pty.openpty()
    kept = os.dup(0)
    try:
        os.dup2(terminal, 0)
        monkeypatch.setattr(os, "tcgetpgrp", lambda fd: os.getpgrp())
        assert job_of("--stdin", "1").stdin_rank == 1
        monkeypatch.setattr(os, "tcgetpgrp", lambda fd: os.getpgrp() + 1)
        with pytest.raises(Invalid):
            job_of("--stdin", "1")
    finally:
        os.dup2(kept, 0)
        for fd in (kept, leader, terminal):
            os.close(fd)
