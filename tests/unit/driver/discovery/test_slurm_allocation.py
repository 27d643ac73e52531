"""Nodes and slots of a Slurm allocation, from the output of squeue and sinfo and from Slurm's variables."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from elastic.driver.discovery.slurm import (
    Allocation,
    allocation,
    commands_environ,
    nodes_of,
    slots_per_node,
    usable_nodes,
)
from elastic.errors import Invalid


@pytest.mark.parametrize(
    ("environ", "slots"),
    [
        ({}, 1),
        ({"SLURM_TASKS_PER_NODE": "2(x3)"}, 2),
        ({"SLURM_TASKS_PER_NODE": "4"}, 4),
        ({"SLURM_NTASKS_PER_NODE": "8", "SLURM_TASKS_PER_NODE": "8(x2)"}, 8),
        ({"SLURM_GPUS_ON_NODE": "8", "SLURM_NTASKS_PER_NODE": "1"}, 8),
        ({"SLURM_GPUS_ON_NODE": "0", "SLURM_TASKS_PER_NODE": "2(x2)"}, 2),
    ],
)
def test_slots_of_a_node_when_gpus_are_requested_then_gpus_otherwise_tasks(environ, slots):
    assert slots_per_node(environ) == slots


def test_slots_when_nodes_differ_then_refused_unless_specified():
    environ = {"SLURM_JOB_ID": "7", "SLURM_TASKS_PER_NODE": "2(x2),1"}
    with pytest.raises(Invalid):
        allocation(environ, None)
    assert allocation(environ, 3).slots == 3


@pytest.mark.parametrize("environ", [{}, {"SLURM_JOB_ID": ""}, {"SLURM_JOB_ID": "7; rm"}])
def test_allocation_when_the_process_runs_outside_of_slurm_then_refused(environ):
    with pytest.raises(Invalid):
        allocation(environ, 1)


def test_nodes_of_an_array_task_when_all_tasks_are_listed_then_only_its_own():
    assert nodes_of("12", "13|n3\n12|n[1-2]\n14|\n") == "n[1-2]"
    assert nodes_of("12", "13|n3\n") == ""


def test_nodes_when_drained_or_down_then_left_out_and_unresponsive_ones_kept():
    states = (
        "n1|allocated\nn2|draining\nn3|down*\nn4|mixed*\nn1|allocated\nn5|draining@\nn6|idle~\n"
    )
    assert usable_nodes(states) == ["n1", "n4", "n6"]


def test_environment_of_slurm_commands_excludes_variables_of_the_allocation():
    environ = {"SLURM_CONF": "c", "SLURM_JOB_ID": "7", "SQUEUE_FORMAT": "%i", "PATH": "p"}
    assert commands_environ(environ) == {"SLURM_CONF": "c", "PATH": "p"}


def program(folder: Path, name: str, text: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def listed(folder: Path) -> dict[str, int]:
    environ = {"PATH": f"{folder}:/usr/bin:/bin"}
    return asyncio.run(Allocation("7", 2, environ).hosts())


def test_hosts_when_the_controller_answers_then_usable_nodes_with_slots(tmp_path):
    program(tmp_path, "squeue", "echo '7|n[1-2]'")
    program(tmp_path, "sinfo", "printf 'n1|allocated\\nn2|draining\\n'")
    assert listed(tmp_path) == {"n1": 2}


@pytest.mark.parametrize(
    "text", ["echo slurm_load_jobs error: Invalid job id >&2; exit 1", "true", "echo '8|n1'"]
)
def test_hosts_when_the_job_is_not_listed_then_invalid(tmp_path, text):
    program(tmp_path, "squeue", text)
    with pytest.raises(Invalid):
        listed(tmp_path)
