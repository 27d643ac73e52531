"""From a command line to a Job: every flag and default, and an error for every mistake before anything starts."""

from __future__ import annotations

import argparse
import dataclasses
import re
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from elastic.driver.commandline import cli
from elastic.driver.commandline.options import command_names
from elastic.driver.commandline.options.flags import Options, parse, parser
from elastic.driver.commandline.setup import check_build, docs_cli
from elastic.driver.job.job import Job
from elastic.driver.launch import mistyped_variables
from elastic.driver.network.host_lists import ThisHost
from elastic.driver.settings import UNBOUNDED
from elastic.errors import Invalid
from harness.golden import recorded
from harness.program import output_of
from harness.refusals import refusal_of

PYTHON = sys.executable
ENVIRON = {"PATH": "/usr/bin:/bin"}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give each test a current directory of its own, with a script in it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("print('hello')\n")
    return tmp_path


@pytest.fixture(autouse=True)
def no_other_horovod(monkeypatch):
    monkeypatch.setattr(check_build, "other_horovod", lambda: None)


def job(line: str, command: str = "sleep 1", *, cores: int = 8, **environ: str) -> Job:
    environment = ENVIRON | environ
    words = [*line.split(), *command.split()]
    here = ThisHost(hostname="trainer", resolve=lambda name: ["192.0.2.7"])
    options = cli.read_options(words, environment)
    return cli.make_job(options, environment, this_host=here, cores=cores)


def refusal(line: str, command: str = "sleep 1", *, cores: int = 8, **environ: str) -> str:
    return refusal_of(job, line, command, cores=cores, **environ)


def workers(line: str) -> tuple[int, int, int, bool]:
    settings = job(line).settings
    return settings.np, settings.workers_min, settings.workers_max, settings.elastic


def collective_timeout_s(of: Job) -> float:
    return float(of.settings.env["ELASTIC_COLLECTIVE_TIMEOUT"])


def warnings(of: Job) -> list[str]:
    return [text for level, text in of.notes if level == "warning"]


# ---- start of the program


@pytest.mark.parametrize(
    ("line", "command"),
    [
        ("-np 4 python train.py --lr 0.1", "python train.py --lr 0.1"),
        ("-np 4 -- python train.py -- x", "python train.py -- x"),
        ("-np 4 python train.py -np 8 -H x --help", "python train.py -np 8 -H x --help"),
        ("--verbose -np 4 python -u -p 3 -n -l", "python -u -p 3 -n -l"),
        ("--blacklist-cooldown-range 5 9 -np 4 python", "python"),
        ("--num-proc=4 -Hlocalhost:4 --tcp python", "python"),
        ("-np 4", ""),
    ],
)
def test_program_starts_at_the_first_argument_that_is_not_a_flag(line, command):
    options = parse(line.split())
    assert options.command == command.split()
    assert options.num_proc == 4


def test_scripts_are_judged_strictly_with_the_flag_or_its_variable():
    assert job("-np 2").settings.judge_scripts and not job("-np 2").settings.strict
    assert job("-np 2 --strict").settings.strict
    assert job("-np 2", ELASTIC_STRICT="1").settings.strict


def test_spellings_of_horovod_are_accepted():
    line = (
        "-np 2 --min-num-proc 1 --max-num-proc 3 -hostfile h -prefix-timestamp -p 22 -i key"
        " --network-interface eth0,eth1 --network-interfaces lo --gloo --disable-cache"
        " --blacklist-cooldown-range 60 300 --log-level warning --slots-per-host 2"
    )
    assert parse(line.split()) == Options(
        num_proc=2,
        min_num_proc=1,
        max_num_proc=3,
        hostfile="h",
        prefix_output_with_timestamp=True,
        ssh_port=22,
        ssh_identity_file="key",
        network_interfaces=["eth0", "eth1", "lo"],
        disable_cache=True,
        cooldown_range=[60.0, 300.0],
        log_level="WARNING",
        slots_per_host=2,
    )


# ---- number of workers


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("-np 4", (4, 4, 4, False)),
        ("-np 4 -H localhost:8", (4, 4, 4, False)),
        ("-np 4 --min-np 2", (4, 2, 4, True)),
        ("--min-np 2", (2, 2, 2, True)),
        ("-np 4 --max-np 8", (4, 4, 8, True)),
        ("--min-np 2 --max-np 8", (2, 2, 8, True)),
        ("-np 4 --min-np 2 -H localhost:8", (4, 2, 4, True)),
        ("-np 4 --host-discovery-script /bin/true", (4, 4, UNBOUNDED, True)),
        ("--min-np 2 --host-discovery-script /bin/true", (2, 2, UNBOUNDED, True)),
        ("--min-np 2 --max-np 4 --host-discovery-script /bin/true", (2, 2, 4, True)),
    ],
)
def test_number_of_workers_is_derived_from_the_flags(line, expected):
    assert workers(line) == expected


@pytest.mark.parametrize(
    "line",
    [
        "",
        "--max-np 4",
        "--host-discovery-script /bin/true",
        "-np 0",
        "-np -2",
        "-np four",
        "-np 2.5",
        "-np 4 --min-np 5",
        "-np 4 --min-np 5 --max-np 8",
        "-np 9 --max-np 8",
        "--min-np 9 --max-np 8",
        "-np 9 --min-np 2 --max-np 8",
        "-np 2 --standbys 1",
        "-np 2 --preload auto,my-module",
        "-np 2 --preload auto,0",
        "-np 2 --preload off,2",
        "-np 2 --min-np 1 --standbys -1",
        "-np 2 --max-np 4 -H localhost:4 --standbys 1",
        "-np 5 -H localhost:2,127.0.0.2:2",
        "-np 5000",
        "--min-np 2 --max-np 300 --standbys 4",
        "--reset-limit -1 -np 2",
        "--elastic-timeout 0 -np 2",
        "--elastic-timeout nan -np 2",
        "--start-timeout soon -np 2",
        "--blacklist-cooldown-range 60 5 -np 2",
        "--blacklist-cooldown-range 60",
        "--slot-attempts 0 -np 2",
        "--log-level LOUD -np 2",
    ],
)
def test_invalid_numbers_of_workers_are_rejected(line):
    recorded("messages", refusal(line))


@pytest.mark.parametrize(
    ("line", "variable", "expected"),
    [
        ("-np 2", "", ""),
        ("-np 2 --min-np 1", None, "auto,1"),
        ("-np 2 --min-np 1", "", "auto,1"),
        ("-np 2 --min-np 1", "off", ""),
        ("-np 2 --min-np 1 --preload off", "torch", ""),
        ("-np 2 --min-np 1 --preload auto,json,2", None, "auto,json,2"),
        ("-np 2 --preload torch", None, "torch,1"),
    ],
)
def test_preload_defaults_to_auto_for_elastic_jobs(line, variable, expected):
    given = {} if variable is None else {"ELASTIC_PRELOAD": variable}
    assert job(line, **given).preload == expected


@pytest.mark.parametrize("words", [["stauts"], ["frobnicate", "x"], ["sleep", "1"], ["stat"]])
def test_misspelt_command_is_not_run_as_a_program(words, capsys):
    assert cli.main(words) == 2
    recorded("output", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("line", "command", "levels"),
    [
        ("-np 2", "sleep 1 --min-np 1", ["warning"]),
        ("-np 2", "sleep 1 --max-num-proc=3 --checkpoint-dir d", ["warning", "info"]),
        ("-np 2", "sleep -np 4", []),  # given twice, so the second is the program's
        ("-np 2 --checkpoint-dir d", "sleep 1 --checkpoint-dir e", []),
        ("-np 2", "sleep 1 -- --min-np 1", []),
        ("-np 2", "sleep --lr 1 --resume --fresh", []),
        ("-np 2", "train.py --journal x --dashboard :0 --verbose -v --help", ["warning"] * 3),
        ("-np 2", "python3 -u train.py --health-check ./check.sh --lr 1", ["warning"]),
        ("-np 2", "own_flags.py --journal x --report r --summary", ["warning"]),
    ],
)
def test_flag_when_placed_after_the_program_then_a_note_names_the_flag(
    line, command, levels, folder
):
    parser = "import argparse\np.add_argument('--journal')\np.add_argument('--report-to')\n"
    (folder / "own_flags.py").write_text(parser)
    plain = job(line, "sleep 1").notes
    notes = [each for each in job(line, command).notes if each not in plain]
    assert [level for level, _ in notes] == levels
    if notes:
        recorded("log", [text for _, text in notes])


@pytest.mark.parametrize(
    ("line", "count"),
    [
        ("-np 3 --max-np 4", 1),
        ("--min-np 2 --max-np 4 -H localhost:3", 1),
        ("-np 4 --min-np 2", 0),
        ("-np 2 --max-np 4 -H localhost:2", 0),
        ("-np 2 -H localhost:4", 0),
    ],
)
def test_workers_when_more_start_than_np_then_a_note_explains_the_number(line, count):
    notes = [text for level, text in job(line).notes if level == "info"]
    assert len(notes) == 1 + count  # one is about threads
    recorded("log", notes)


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("-np 2 --journal nodir/j", "--journal"),
        ("-np 2 --dashboard 8080x", "--dashboard"),
        ("-np 2 --metrics-port 99999", "--metrics-port"),
        ("-np 2 --report nodir/r.html", "--report"),
        ("-np 2 --preemption nosuch", "--preemption"),
        ("-np 2 --checkpoint-every 5x --checkpoint-dir d", "--checkpoint-every"),
        ("-np 4 -H localhost:2", "-np"),
        ("-np 2 --host-discovery-script ./nosuch.sh", "nosuch.sh"),
    ],
)
@pytest.mark.parametrize("command", ["nosuch.py", ""])
def test_mistake_in_a_flag_when_the_program_is_missing_too_then_the_flag_is_named(
    line, named, command, folder
):
    before = sorted(folder.rglob("*"))
    assert named in refusal(line, command)
    assert sorted(folder.rglob("*")) == before, "nothing is left"
    assert "nosuch.py" in refusal(
        "-np 2 --journal j --checkpoint-dir d --tensorboard t", "nosuch.py"
    )
    assert sorted(folder.rglob("*")) == before


def test_fresh_when_resume_is_also_given_then_a_note_names_the_effective_flag():
    resumed = job("-np 1 --journal j --resume").notes
    both = job("-np 1 --journal j --resume --fresh").notes
    [(level, text)] = [each for each in both if each not in resumed]
    assert level == "info"
    recorded("log", text)
    assert job("-np 1 --journal j --fresh").notes == job("-np 1 --journal j").notes


def test_flag_after_the_program_is_reported():
    recorded("messages", refusal("", "sleep -np 4"))


@pytest.mark.parametrize(
    "words",
    [
        ["--min-nump", "3"],
        ["-np4"],
        ["-n", "4"],
        ["-c"],
        ["--zzz=3"],
        ["-np"],
        ["--network-interface", ","],
    ],
)
def test_unknown_flags_and_missing_values_are_rejected(words):
    recorded("messages", refusal_of(parse, words))


# ---- hosts


@pytest.mark.parametrize(
    ("line", "near"),
    [
        ("--min-npp 2 x", "--min-np"),
        ("status --jsn", "--json"),
        ("explain --htlm=x journal", "--html"),
        ("checkpoints --verfy x", "--verify"),
        ("agent --drivr x", "--driver"),
        ("k8s run --imagee x", "--image"),
        ("docs --hlp", "--help"),
    ],
)
def test_each_command_suggests_the_flag_closest_to_an_unknown_one(capsys, line, near):
    assert cli.main(line.split()) == 2
    assert f" {near}?" in capsys.readouterr().err


def test_slots_are_on_this_machine_without_hosts():
    assert job("-np 3").hosts == {"localhost": 3}
    assert job("-np 3 --min-np 1 --max-np 6").hosts == {"localhost": 6}
    assert job("-np 3 --max-np 6 --standbys 2").hosts == {"localhost": 8}


def test_several_names_of_this_machine_are_several_hosts(folder):
    assert job("-np 4 -H localhost:2,127.0.0.2:2").hosts == {"localhost": 2, "127.0.0.2": 2}
    assert job("-np 3 -H trainer:2,[::1]").hosts == {"trainer": 2, "::1": 1}
    (folder / "hosts").write_text("localhost slots=2\n127.1\n")
    assert job("-np 5 --hostfile hosts --slots-per-host 3").hosts == {"localhost": 2, "127.1": 3}


def test_discovery_script_is_found_but_not_run_yet(folder):
    (folder / "hosts.sh").write_text(f"#!/bin/sh\ntouch {folder}/was-run\n")
    (folder / "hosts.sh").chmod(0o755)
    made = job("-np 2 --host-discovery-script ./hosts.sh --slots-per-host 4")
    assert (made.hosts, made.script, made.slots_per_host) == (None, [f"{folder}/hosts.sh"], 4)
    assert not (folder / "was-run").exists()


@pytest.mark.parametrize(
    "line",
    [
        "-np 2 -H gpu7:2 -i key",
        "-np 2 -H a:1 --hostfile b",
        "-np 2 --hostfile nowhere",
        "-np 2 --host-discovery-script ./train.py",
        "-np 2 --host-discovery-script no.sh",
        "-np 2 --network-interface eth77",
        "-np 2 --mpi",
        "-np 2 --jsrun",
    ],
)
def test_invalid_hosts_are_rejected(line):
    recorded("messages", refusal(line))


def test_network_interface_determines_the_address():
    assert job("-np 2").bind == "127.0.0.1"
    made = job("-np 2 --network-interfaces eth77,lo")
    assert (made.bind, made.environ["NCCL_SOCKET_IFNAME"]) == ("127.0.0.1", "=lo")
    assert job("-np 2 --network-interface ::1").bind == "::1"


# ---- program


def test_program_must_be_executable(folder):
    (folder / "run.sh").write_text("echo\n")
    (folder / "self.py").write_text("#!/usr/bin/env python3\n")
    (folder / "self.py").chmod(0o755)
    (folder / "bare.py").write_text("print()\n")
    (folder / "bare.py").chmod(0o755)
    for command in ["", "./run.sh", "nonesuch", "./nonesuch", ".", f"{PYTHON} trian.py"]:
        recorded("messages", refusal("-np 2", command))
    assert job("-np 2", "./self.py --lr 1").command == ["./self.py", "--lr", "1"]
    assert job("-np 2", f"{PYTHON} train.py").command == [PYTHON, "train.py"]
    assert job("-np 2", f"{PYTHON} -m nonesuch.py").command[1:] == ["-m", "nonesuch.py"]


# ---- output


def test_output_folders_are_created_and_tested(folder):
    made = job("-np 2 --output-filename out/logs --journal j.jsonl --prefix-output-with-timestamp")
    assert made.output_dir == f"{folder}/out/logs"
    assert (folder / "out/logs").is_dir()
    assert list((folder / "out/logs").iterdir()) == []
    assert made.journal == f"{folder}/j.jsonl"
    assert made.prefix_timestamps


def test_existing_journal_is_unchanged_before_the_job_starts(folder):
    (folder / "j.jsonl").write_text("old\n")
    job("-np 2 --journal j.jsonl")
    assert (folder / "j.jsonl").read_text() == "old\n"


def test_journal_path_of_a_kept_journal_is_rejected(folder):
    (folder / "run").write_text('{"journal":')
    recorded("messages", refusal("-np 2 --journal run.1"))
    assert not (folder / "run.1").exists()


@pytest.mark.parametrize(
    "line",
    [
        "--output-filename train.py",
        "--output-filename train.py/x",
        "--output-filename /proc/x",
        "--journal no/where.jsonl",
        "--journal .",
    ],
)
def test_unwritable_output_is_rejected(line):
    recorded("messages", refusal(f"-np 2 {line}"))


def test_log_levels_are_parsed():
    assert job("-np 2").log_level == "INFO"
    assert job("-np 2 --verbose").log_level == "DEBUG"
    made = job("-np 2 --log-level error --verbose")
    assert (made.log_level, made.settings.env["HOROVOD_LOG_LEVEL"]) == ("ERROR", "ERROR")


# ---- settings and their sources


def test_every_setting_has_a_flag():
    settings = job(
        "-np 2 --min-np 1 --start-timeout 7 --elastic-timeout 8.5 --reset-limit 3 --blacklist-cooldown-range 2 20"
        " --slot-attempts 4 --host-attempts 2 --gloo-timeout-seconds 12.5 --tcp --digests --allow-inexact"
    ).settings
    assert (settings.start_timeout_s, settings.elastic_timeout_s) == (7.0, 8.5)
    assert (settings.reset_limit, settings.slot_attempts, settings.host_attempts) == (3, 4, 2)
    assert (settings.cooldown_min_s, settings.cooldown_max_s) == (2.0, 20.0)
    assert settings.env["HOROVOD_GLOO_TIMEOUT_SECONDS"] == "12.5"
    tenth = job("-np 2 --gloo-timeout-seconds 0.1").settings
    assert tenth.env["HOROVOD_GLOO_TIMEOUT_SECONDS"] == "0.1"
    assert settings.env["NCCL_IB_DISABLE"] == "1"
    assert settings.env["ELASTIC_DIGESTS"] == "tensors"
    assert settings.env["ELASTIC_MIN_WORKERS"] == "1"
    assert settings.env["ELASTIC_ALLOW_INEXACT"] == "1"


def test_command_line_overrides_file_overrides_environment(folder):
    (folder / "job.yaml").write_text("library_options:\n  gloo_timeout_seconds: 50\n")

    def timeout(line: str) -> str:
        made = job(f"-np 2 {line}", HOROVOD_GLOO_TIMEOUT_SECONDS="40")
        return made.settings.env["HOROVOD_GLOO_TIMEOUT_SECONDS"]

    assert job("-np 2").settings.env["HOROVOD_GLOO_TIMEOUT_SECONDS"] == "30"
    assert timeout("") == "40"
    assert timeout("--config-file job.yaml") == "50"
    assert timeout("--gloo-timeout-seconds 60 --config-file job.yaml") == "60"


def test_environment_is_validated():
    assert job("-np 2", HOROVOD_START_TIMEOUT="5").settings.start_timeout_s == 5.0
    assert job("-np 2 --min-np 1", HOROVOD_ELASTIC_TIMEOUT="6").settings.elastic_timeout_s == 6.0
    assert job("-np 2", HOROVOD_LOG_LEVEL="").log_level == "INFO"
    recorded("messages", refusal("-np 2", HOROVOD_START_TIMEOUT="x"))


def test_drivers_environment_is_inherited_but_not_shown():
    made = job("-np 2", TOKEN="hush")
    assert made.environ["TOKEN"] == "hush"
    assert "hush" not in repr(made)


def test_schedulers_set_the_ssh_port_for_this_machine_too():
    made = job("-p 12350 -H localhost:2 -np 2")
    assert made.hosts == {"localhost": 2}
    assert made.fleet is not None and not made.fleet.needed


def test_islands_are_passed_to_workers_and_refused_if_malformed():
    assert (
        job("-np 2 --islands eu=eu-*;us=us-*").settings.env["ELASTIC_ISLANDS"] == "eu=eu-*;us=us-*"
    )
    recorded("messages", refusal("-np 2 --islands eu"))
    recorded("messages", refusal("-np 2", ELASTIC_ISLANDS="eu=a;eu=b"))


def test_cores_are_shared_unless_the_user_sets_threads():
    made = job("-np 3", cores=8)
    assert made.settings.env["OMP_NUM_THREADS"] == "2"
    assert made.notes == [
        ("info", "OMP_NUM_THREADS=2 (8 cores, up to 3 workers) for each worker, since it is unset")
    ]
    assert job("-np 16", cores=2).settings.env["OMP_NUM_THREADS"] == "1"
    # At its maximum size the job still has no more threads than cores.
    assert job("-np 2 --max-np 8 -H localhost:4").settings.env["OMP_NUM_THREADS"] == "2"
    # A script may list any number of slots, so the share is determined when a worker starts.
    listed = job("--min-np 1 --host-discovery-script /bin/true")
    assert "OMP_NUM_THREADS" not in listed.settings.env
    assert listed.notes == []
    recorded("messages", job("-np 1", cores=8).notes[0][1])
    chosen = job("-np 3", OMP_NUM_THREADS="5")
    assert "OMP_NUM_THREADS" not in chosen.settings.env
    assert chosen.notes == []


# ---- Horovod variables of workers


def workers_environment(made: Job) -> dict[str, str]:
    """Return the variables that the job adds, without the HOROVOD_ prefix."""
    return {
        name.removeprefix("HOROVOD_"): value
        for name, value in made.settings.env.items()
        if name.startswith("HOROVOD_")
    }


def test_flags_are_passed_to_the_workers(folder):
    made = job(
        "-np 2 --fusion-threshold-mb 0.5 --cycle-time-ms 2.5 --cache-capacity 0 --thread-affinity 1,3"
        " --timeline-filename t.json --timeline-mark-cycles --log-without-timestamp --no-stall-check"
        " --stall-check-warning-time-seconds 20 --stall-check-shutdown-time-seconds 40"
        " --log-level error --network-interface lo"
    )
    assert workers_environment(made) == {
        "FUSION_THRESHOLD": "524288",
        "CYCLE_TIME": "2.5",
        "CACHE_CAPACITY": "0",
        "THREAD_AFFINITY": "1,3",
        "TIMELINE": f"{folder}/t.json",
        "TIMELINE_MARK_CYCLES": "1",
        "LOG_HIDE_TIME": "1",
        "STALL_CHECK_DISABLE": "1",
        "STALL_CHECK_TIME_SECONDS": "20",
        "STALL_SHUTDOWN_TIME_SECONDS": "40",
        "LOG_LEVEL": "ERROR",
        "GLOO_TIMEOUT_SECONDS": "30",
    }
    assert made.settings.timeline == f"{folder}/t.json"
    assert not (folder / "t.json").exists()
    assert not made.log_timestamps


def test_switches_can_be_turned_off():
    line = "--timeline-mark-cycles --no-timeline-mark-cycles --log-hide-timestamp"
    made = job(f"-np 2 {line} --no-log-hide-timestamp --no-stall-check --stall-check")
    assert workers_environment(made) == {
        "GLOO_TIMEOUT_SECONDS": "30",
        "TIMELINE_MARK_CYCLES": "0",
        "LOG_HIDE_TIME": "0",
        "STALL_CHECK_DISABLE": "0",
    }


def test_flag_overrides_the_inherited_variable(folder):
    inherited: dict[str, Any] = {
        "HOROVOD_FUSION_THRESHOLD": "1000001",
        "HOROVOD_CYCLE_TIME": "7",
        "HOROVOD_TIMELINE": "there.json",
        "HOROVOD_TIMELINE_MARK_CYCLES": "1",
    }
    made = workers_environment(job("-np 2", **inherited))
    assert made["FUSION_THRESHOLD"] == "1000001"
    assert made["TIMELINE"] == f"{folder}/there.json"
    line = "--fusion-threshold-mb 2 --cycle-time-ms 3 --no-timeline-mark-cycles"
    made = workers_environment(job(f"-np 2 {line} --timeline-filename here.json", **inherited))
    assert (made["FUSION_THRESHOLD"], made["CYCLE_TIME"]) == ("2097152", "3")
    assert (made["TIMELINE"], made["TIMELINE_MARK_CYCLES"]) == (f"{folder}/here.json", "0")


def test_dynamic_timeline_is_started_by_the_script():
    made = job("-np 2", HOROVOD_TIMELINE="DYNAMIC")
    assert made.settings.timeline is None
    assert "HOROVOD_TIMELINE" not in made.settings.env
    assert made.environ["HOROVOD_TIMELINE"] == "DYNAMIC"


@pytest.mark.parametrize(
    ("line", "environ"),
    [
        ("--thread-affinity 0,x", {}),
        ("--cycle-time-ms -1", {}),
        ("--timeline-filename .", {}),
        ("--timeline-filename no/t", {}),
        ("--timeline-filename /dev/null", {}),
        ("--report /dev/null", {}),
        ("--report=", {}),
        ("", {"HOROVOD_CACHE_CAPACITY": "x"}),
        ("", {"HOROVOD_FUSION_THRESHOLD": "1e6"}),
        ("", {"HOROVOD_DYNAMIC_PROCESS_SETS": "y"}),
        ("", {"ELASTIC_CHECKS": "maybe"}),
        ("", {"ELASTIC_DIGESTS": "tensor"}),
        ("", {"ELASTIC_NATIVE": "no"}),
        ("--report /proc/r.html", {}),
        ("--timeline-filename /proc/t.json", {}),
    ],
)
def test_values_that_workers_cannot_parse_are_rejected_before_the_start(line, environ):
    recorded("messages", refusal(f"-np 2 {line}", **environ))


# ---- failure detection


def detection(made: Job) -> tuple[float, float, float, float]:
    s = made.settings
    return s.lease_s, s.idle_s, s.busy_warning_s, s.busy_s


def test_time_limits_of_failure_detection_have_defaults():
    assert detection(job("-np 2 --min-np 1")) == (2, 30, 60, 600)
    assert detection(job("-np 2")) == (2, 600, 60, 600)  # an idle worker would not be replaced
    line = "-np 2 --lease 5 --idle-timeout 7 --busy-warning 8 --busy-timeout 9"
    assert detection(job(line)) == (5, 7, 8, 9)
    assert detection(job("-np 2 --idle-timeout 0 --busy-timeout 0")) == (2, 0, 60, 0)
    recorded("messages", refusal("-np 2 --lease 0"))


def test_horovods_flags_set_the_same_limits():
    named = "--stall-check-warning-time-seconds 20 --stall-check-shutdown-time-seconds 40"
    assert detection(job(f"-np 2 {named}")) == (2, 40, 20, 40)
    made = job(
        "-np 2", HOROVOD_STALL_CHECK_TIME_SECONDS="20", HOROVOD_STALL_SHUTDOWN_TIME_SECONDS="40"
    )
    assert detection(made) == (2, 40, 20, 40)
    assert detection(job("-np 2", HOROVOD_STALL_SHUTDOWN_TIME_SECONDS="0")) == (2, 600, 60, 600)
    stall_check = "stall_check: {warning_time_seconds: 20, shutdown_time_seconds: 40}"
    assert detection(config(stall_check)) == (2, 40, 20, 40)


def test_stall_check_can_be_disabled():
    assert detection(job("-np 2 --no-stall-check --busy-timeout 9")) == (2, 0, 0, 0)
    assert detection(job("-np 2", HOROVOD_STALL_CHECK_DISABLE="1")) == (2, 0, 0, 0)
    assert detection(job("-np 2", HOROVOD_STALL_CHECK_DISABLE="0")) == (2, 600, 60, 600)
    assert detection(job("-np 2 --stall-check", HOROVOD_STALL_CHECK_DISABLE="1"))[1] == 600
    error = refusal("-np 2", HOROVOD_STALL_CHECK_DISABLE="no")
    recorded("log", error)


def test_gloo_times_out_long_after_the_driver_would_act():
    assert collective_timeout_s(job("-np 2 --min-np 1")) == 660
    assert collective_timeout_s(job("-np 2 --min-np 1 --busy-timeout 90")) == 150
    assert collective_timeout_s(job("-np 2 --min-np 1 --no-stall-check")) == 86400
    assert collective_timeout_s(job("-np 2 --min-np 1 --gloo-timeout-seconds 5")) == 5
    assert collective_timeout_s(job("-np 2 --min-np 1", HOROVOD_GLOO_TIMEOUT_SECONDS="6")) == 6


def test_limit_of_gpu_hangs_is_derived_from_the_flags():
    def limits(made: Job) -> tuple[float, float]:
        return made.settings.gpu_hang_s, made.settings.gpu_limit_s

    assert limits(job("-np 2 --min-np 1")) == (10, 180)
    assert limits(job("-np 2 --gpu-hang-timeout 3")) == (3, 180)
    assert limits(job("-np 2 --gpu-hang-timeout 0")) == (0, 180)
    assert limits(job("-np 2 --no-stall-check"))[0] == 0
    assert limits(job("-np 2 --gloo-timeout-seconds 300")) == (10, 300)


def test_users_collective_timeout_takes_precedence():
    made = job("-np 2 --min-np 1", ELASTIC_COLLECTIVE_TIMEOUT="900")
    assert (collective_timeout_s(made), made.settings.gpu_limit_s) == (900, 900)
    for wrong in ("soon", "0", "nan"):
        error = refusal("-np 2", ELASTIC_COLLECTIVE_TIMEOUT=wrong)
        wanted = f"ELASTIC_COLLECTIVE_TIMEOUT: pass a number of seconds above 0, not {wrong!r}"
        assert error.startswith(wanted)


def test_static_job_has_the_same_limits_as_an_elastic_job():
    """Rank 0 may validate or save for longer than connecting takes: Horovod has no timeout there."""
    assert collective_timeout_s(job("-np 2")) == 660
    assert job("-np 2").settings.env["HOROVOD_GLOO_TIMEOUT_SECONDS"] == "30"  # to connect
    made = job("-np 2 --gloo-timeout-seconds 5")
    assert collective_timeout_s(made) == 5
    assert made.settings.env["HOROVOD_GLOO_TIMEOUT_SECONDS"] == "5"


def test_metrics_address_is_parsed():
    assert job("-np 2").metrics is None
    assert job("-np 2 --metrics-port 9100").metrics == ("127.0.0.1", 9100)
    assert job("-np 2 --metrics-port 9100 --metrics-host ::").metrics == ("::", 9100)
    recorded("messages", refusal("-np 2 --metrics-host ::"))
    assert "pass 1 to 65535" in refusal("-np 2 --metrics-port 70000")


# ---- flags without effect


def test_flags_without_effect_are_reported_with_the_reason():
    made = job("-np 2 --autotune --torus-allreduce --mpi-args=-x --binding-args y --no-autotune")
    recorded("messages", warnings(made))
    assert warnings(job("-np 2 --no-stall-check --no-hierarchical-allreduce --gloo")) == []
    [warning] = warnings(job("-np 2", HOROVOD_AUTOTUNE="1", HOROVOD_NUM_NCCL_STREAMS="1"))
    recorded("messages", warning)
    [warning] = warnings(job("-np 2 --num-nccl-streams 2"))
    recorded("messages", warning)
    [warning] = warnings(job("-np 2", HOROVOD_CONTROLLER="mpi", HOROVOD_CPU_OPERATIONS="gloo"))
    recorded("messages", warning)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "HOROVOD_CYCEL_TIME",
            ["HOROVOD_CYCEL_TIME has no effect; did you mean HOROVOD_CYCLE_TIME?"],
        ),
        ("HOROVOD_BOGUS", ["HOROVOD_BOGUS has no effect: it is not a variable of this program"]),
        ("ELASTIC_STANDBY", ["ELASTIC_STANDBY has no effect; did you mean ELASTIC_STANDBYS?"]),
        ("ELASTIC_APM_LOG_LEVEL", []),  # of another product
        ("HOROVOD_WITH_PYTORCH", []),  # of images made for Horovod
        ("HOROVOD_LOCAL_RANK", []),  # of the job that starts this one
    ],
)
def test_mistyped_variable_is_reported(name, expected):
    environ: dict[str, Any] = {name: "1"}
    assert warnings(job("-np 2", **environ)) == expected


def test_service_variables_of_kubernetes_are_not_reported():
    port = "tcp://10.0.0.7:4711"
    links: dict[str, Any] = {
        "HOROVOD_DRIVER_SERVICE_HOST": "10.0.0.7",
        "HOROVOD_DRIVER_SERVICE_PORT": "4711",
        "HOROVOD_DRIVER_PORT": port,
        "HOROVOD_DRIVER_PORT_4711_TCP": port,
        "ELASTIC_SERVICE_HOST": "10.0.0.8",
        "ELASTIC_PORT": port,
    }
    assert warnings(job("-np 2", **links)) == []
    assert len(warnings(job("-np 2", HOROVOD_DRIVER_PORT=port))) == 1


def test_every_variable_named_in_the_code_is_known():
    sources = [
        path.read_text()
        for folder in ("driver", "elastic", "horovod")
        for path in (Path(cli.__file__).parents[2] / folder).rglob("*.py")
    ]
    named = set(
        re.findall(r"""["'`]((?:HOROVOD|ELASTIC)_[A-Z0-9_]*[A-Z0-9])\b""", "\n".join(sources))
    )
    of_flags = {*parser().variables, *parser().switches}
    assert (
        len(named) > 60
        and named <= of_flags | mistyped_variables.OF_USERS | mistyped_variables.OURS
    )


def test_elastic_flags_are_reported_in_a_static_job():
    recorded(
        "messages", warnings(job("-np 2 --reset-limit 3 --elastic-timeout 9 --slot-attempts 2"))
    )
    assert warnings(job("-np 2 --min-np 1 --reset-limit 3")) == []


def test_another_horovod_is_reported(monkeypatch):
    monkeypatch.setattr(check_build, "other_horovod", lambda: "Horovod is here too")
    recorded("messages", warnings(job("-np 2")))


# ---- configuration file


def config(text: str, line: str = "-np 2") -> Job:
    Path("job.yaml").write_text(text)
    return job(f"{line} --config-file job.yaml")


def test_config_file_in_horovods_format():
    made = config(
        """\
        controller: gloo
        params: {fusion_threshold_mb: 32, cycle_time_ms: 10, hierarchical_allreduce: false}
        autotune: {enabled: true, log_file: 'log.txt', gaussian_process_noise: 0.9}
        timeline:
        stall_check: {enabled: false, warning_time_seconds: 120}
        library_options: {gloo_timeout_seconds: 60, num_nccl_streams: null}
        logging: {level: debug, hide_timestamp: true}
        """
    )
    assert made.log_level == "DEBUG"
    assert made.settings.env["HOROVOD_GLOO_TIMEOUT_SECONDS"] == "60"
    [warning] = warnings(made)
    recorded("messages", warning)
    assert workers_environment(made) == {
        "FUSION_THRESHOLD": str(32 * 2**20),
        "CYCLE_TIME": "10",
        "GLOO_TIMEOUT_SECONDS": "60",
        "LOG_LEVEL": "DEBUG",
        "LOG_HIDE_TIME": "1",
        "STALL_CHECK_DISABLE": "1",
        "STALL_CHECK_TIME_SECONDS": "120",
    }
    assert made.settings.idle_s == made.settings.busy_s == made.settings.busy_warning_s == 0


def test_flags_override_the_config_file():
    assert config("controller: mpi", "-np 2 --gloo").command == ["sleep", "1"]
    assert warnings(config("autotune: {enabled: true}", "-np 2 --no-autotune")) == []
    assert config("logging: {level: DEBUG}", "-np 2 --log-level ERROR").log_level == "ERROR"
    assert config("").log_level == "INFO"


@pytest.mark.parametrize(
    "text",
    [
        "controller: mpi",
        "controller: nccl",
        "loging: {}",
        "zzz: {}",
        "logging: {levle: INFO}",
        "logging: {level: LOUD}",
        "logging: {level: [INFO]}",
        "logging: INFO",
        "autotune: {enabled: maybe}",
        "params: {cycle_time_ms: true}",
        "params: {cache_capacity: -1}",
        "params: {cache_capacity: 1, cache_capacity: 2}",
        "logging: {}\nlogging: {}",
        "- a\n- b",
        "a: [",
        "a: !!python/object:os.system {}",
        "a: \x00",
        "[" * 1000,
    ],
)
def test_invalid_config_file_is_rejected(text):
    recorded("messages", refusal_of(config, text))


def test_unreadable_config_file_is_rejected(folder):
    recorded("messages", refusal("-np 2 --config-file none"))
    (folder / "bytes").write_bytes(b"\xff\xff")
    recorded("messages", refusal("-np 2 --config-file bytes"))


# ---- the program itself


@pytest.mark.parametrize(
    ("called", "name"),
    [
        ("/opt/bin/elasticrun", "elasticrun"),
        ("/opt/bin/horovodrun", "horovodrun"),
        ("/opt/elastic/driver/commandline/cli.py", "elasticrun"),
    ],
)
def test_mistake_is_one_line_and_exit_code_2(capsys, monkeypatch, called, name):
    monkeypatch.setattr("sys.argv", [called])
    assert cli.main(["-np", "four", "python", "train.py"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    recorded("output", captured.err, name)


def test_failing_discovery_script_ends_the_start(folder, capfd):
    (folder / "hosts.sh").write_text("#!/bin/sh\necho no cluster >&2\nexit 1\n")
    (folder / "hosts.sh").chmod(0o755)
    flags = ["--min-np", "1", "--host-discovery-script", "./hosts.sh"]
    assert cli.main([*flags, "touch", f"{folder}/was-started"]) == 2
    last = capfd.readouterr().err.splitlines()[-1]
    recorded("messages", last, folder)
    assert not (folder / "was-started").exists()


@pytest.mark.parametrize("more", [[], ["--host-discovery-script", "./hosts.sh"]])
def test_driver_port_in_use_ends_the_start(folder, capfd, more):
    (folder / "hosts.sh").write_text("#!/bin/sh\necho localhost:1\n")
    (folder / "hosts.sh").chmod(0o755)
    with socket.create_server(("", 0)) as taken:
        port = str(taken.getsockname()[1])
        flags = ["--min-np", "1", "--driver-port", port, "--journal", "j", "--resume", *more]
        assert cli.main([*flags, "touch", f"{folder}/was-started"]) == 2
    last = capfd.readouterr().err.splitlines()[-1]
    assert last.startswith(f"elasticrun: --driver-port {port} ")
    assert not (folder / "was-started").exists()


def test_driver_port_without_effect_is_reported():
    assert any("--driver-port" in warning for warning in warnings(job("-np 1 --driver-port 4000")))
    assert not warnings(job("-np 1 --driver-port 4000 --journal j --resume"))


def test_version_is_printed(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == check_build.version()


@pytest.mark.parametrize(
    ("line", "lines", "columns"),
    [("--help", 50, 100), ("-np 4 -h", 50, 100), ("--help-all", 999, 120)],
)
def test_help_fits_on_one_screen_and_help_all_has_every_flag(capsys, line, lines, columns):
    with pytest.raises(SystemExit) as ended:
        cli.main(line.split())
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert len(text.splitlines()) <= lines
    assert max(map(len, text.splitlines())) <= columns
    known = {name: action for action in parser().actions for name in action.option_strings}
    named = set(re.findall(r"(?<![\w-])--?[a-z][\w-]+", text))
    assert line == "--help-all" or named <= set(known), "no flag is named that does not exist"
    assert {"-np", "--min-np", "--checkpoint-dir", "--help-all"} <= named
    if line == "--help-all":
        public = {action for action in known.values() if action.help != argparse.SUPPRESS}
        assert all(named & set(action.option_strings) for action in public)


def test_help_names_every_command(capsys):
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    words = set(re.findall(r"[a-z0-9]+", capsys.readouterr().out))
    assert words >= {*command_names.COMMANDS, *command_names.OTHER_COMMANDS}


@pytest.mark.parametrize("word", ["many-host", "many-hosts#no-such-section"])
def test_unknown_page_is_an_error(word):
    with pytest.raises(Invalid):
        docs_cli.main([word])


def test_pages_are_listed_with_their_titles(capsys):
    assert docs_cli.main([]) == 0
    listed = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    recorded("messages", listed["many-hosts"])


# ---- --check-build


def test_report_has_the_format_of_horovodrun(monkeypatch):
    monkeypatch.setattr(check_build, "version", lambda: "1.2")
    build = check_build.Build(torch="2.13.0", gloo=True, nccl=True, gpus=1, keras="3.15")
    recorded("log", check_build.describe(build).splitlines())


def test_missing_component_is_reported(monkeypatch):
    monkeypatch.setattr(check_build, "other_horovod", lambda: "Horovod is here too")
    lines = check_build.describe(check_build.Build(trouble="torch can't be imported")).splitlines()
    assert "    [ ] PyTorch" in lines
    recorded("log", lines)
    recorded("log", lines[-4:])


def test_reason_for_missing_shared_memory_is_reported():
    build = check_build.Build(torch="2.13.0", gloo=True, shared="the C++ library was not built")
    last = check_build.describe(build).splitlines()[-1]
    recorded("messages", last)


def python(folder: Path, body: str) -> str:
    """Create a stand-in for the interpreter."""
    file = folder / "python"
    file.write_text(f"#!/bin/sh\n{body}\n")
    file.chmod(0o755)
    return str(file)


def test_torch_is_queried_in_a_separate_process(folder):
    answer = '{"torch": "2.13.0", "gloo": true, "nccl": false, "gpus": 0}'
    found = check_build.probe(python(folder, f"echo noise; echo '{answer}'"))
    assert dataclasses.replace(found, tensorflow="", keras="") == check_build.Build(
        torch="2.13.0", gloo=True
    )


def test_torch_that_cannot_be_queried_is_reported(folder):
    failing = python(folder, "echo 'ModuleNotFoundError: no torch' >&2; exit 1")
    recorded("messages", check_build.probe(failing).trouble)
    recorded("messages", check_build.probe(python(folder, "echo hello")).trouble)
    recorded("messages", check_build.probe(str(folder / "none")).trouble)
    hanging = python(folder, "exec sleep 100")
    recorded("messages", check_build.probe(hanging, timeout_s=0.1).trouble)


def test_another_horovod_is_searched_for(monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(check_build, "_version_of", lambda name: {"horovod": "0.28.1"}.get(name))
    recorded("messages", str(check_build.other_horovod()))
    recorded("messages", check_build.version())
    monkeypatch.setattr(check_build, "_version_of", lambda name: None)
    assert check_build.other_horovod() is None


def test_parsing_flags_needs_neither_torch_nor_numpy():
    program = (
        "import sys\nfrom elastic.driver.commandline import cli\n"
        "assert cli.main(['--version']) == 0\nassert not {'torch', 'numpy'} & set(sys.modules)"
    )
    root = Path(__file__).parents[4]
    output_of(PYTHON, "-c", program, cwd=root)


@pytest.mark.parametrize(
    "line", ["--program-from-pods -np 2", "--kubernetes --job a --program-from-pods python t.py"]
)
def test_program_of_the_pods_needs_pods_and_excludes_another_program(line):
    recorded("messages", refusal_of(cli._program_from_pods, parse(line.split()), {}))
