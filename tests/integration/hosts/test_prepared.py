"""A process that has imported the next worker's modules becomes an equal worker. Real processes."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from elastic.driver.processes import preloaded_pool
from elastic.driver.processes.preloaded_program import leading_imports, script_imports
from harness import wording
from harness.history import SCRIPTS
from harness.waiting import until
from integration.hosts.test_agent import A, B, conversation

OWN_PROCESS = str(SCRIPTS / "own_process.py")
SPARE = {"HOME": "/nowhere", "ELASTIC_PREEMPTION": "off"}


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    """Each imports the requested modules, and not also torch."""
    monkeypatch.setattr(preloaded_pool, "QUIET_S", 0.0)
    only = preloaded_pool.PROGRAM.replace("main;", "main; main.__globals__['OURS'] = ();", 1)
    monkeypatch.setattr(preloaded_pool, "PROGRAM", only)


async def all_wait(host, count: int = 1) -> list[int]:
    """The numbers of the processes that have imported everything, and wait."""
    kept = host.launcher.agent.prepared._kept
    await until(lambda: len(kept) == count, "processes")
    pids = [each.process.pid for each in kept]
    for pid in pids:
        await until(functools.partial(waits_at_its_pipe, pid), f"{pid} to wait")
    return pids


async def waits(host) -> int:
    [pid] = await all_wait(host)
    return pid


async def has_run_an_empty_script(host, modules: str = "auto") -> Path:
    """One worker has run it. Returns the script."""
    host.launcher.agent.prepared.modules = modules
    script: Path = host.folder / "script.py"
    script.write_text("")
    host.start(A, [sys.executable, str(script)])
    await host.exit()
    return script


def waits_at_its_pipe(pid: int) -> bool:
    """Return whether it is in a read() of a pipe: it has imported everything."""
    try:
        number, descriptor, *_ = Path(f"/proc/{pid}/syscall").read_text().split()
        return number == "0" and "pipe:" in os.readlink(f"/proc/{pid}/fd/{int(descriptor, 16)}")
    except (OSError, ValueError):
        return False


async def facts_of(host, worker, name: str) -> tuple[int, Path]:
    folder = host.folder / name / "job"
    folder.mkdir(parents=True)
    host.launcher.agent.start(
        worker,
        [sys.executable, OWN_PROCESS, "-u", "a word"],
        {"PATH": os.environ["PATH"], **SPARE, "HOROVOD_RANK": name, f"HOROVOD_OF_{name}": ""},
        folder=str(folder),
    )
    return host.launcher.agent.pid(worker), folder


@conversation
async def test_worker_in_a_prepared_process_has_the_same_facts_as_a_started_one(host):
    host.launcher.agent.prepared.modules = "torch"
    found: list[dict[str, object]] = []
    for worker, name in ((A, "first"), (B, "second")):
        ready = await waits(host) if found else None
        started, folder = await facts_of(host, worker, name)
        assert started == (ready or started)
        assert (await host.exit()).code == 0
        facts = json.loads((folder / "facts.0").read_text())
        assert facts.pop("pid") == started and facts.pop("parent") == os.getpid()
        facts["variables"].remove(f"HOROVOD_OF_{name}")
        facts["shown"].remove(f"HOROVOD_OF_{name}")
        found.append(facts)
    assert found[0].pop("drawn") != found[1].pop("drawn")
    assert found[0] == found[1]
    assert found[0]["words"] == [OWN_PROCESS, "-u", "a word"]


@conversation
async def test_prepared_process_has_the_command_line_and_tracebacks_of_its_script(host):
    host.launcher.agent.prepared.modules = "auto"
    script = host.folder / "script.py"
    script.write_text("import sys\nif sys.argv[1:]:\n    1 / 0\n")
    env = {"PATH": os.environ["PATH"]}
    host.launcher.start(A, [sys.executable, str(script)], env)
    assert (await host.exit()).code == 0
    ready = await waits(host)
    script.write_text(
        "import sys; print(*open('/proc/self/cmdline').read().split('\\0'))\n"
        "print('as started', sys.orig_argv[1:])\n1 / 0\n"
    )
    host.launcher.start(B, [sys.executable, str(script), "x"], env)
    assert host.launcher.agent.pid(B) == ready
    ended = await host.exit()
    assert ended.code == 1
    assert ended.output.startswith(f'Traceback (most recent call last):\n  File "{script}", line 3')
    assert ended.output.rstrip().endswith("ZeroDivisionError: division by zero")
    await until(lambda: b"script.py x" in bytes(host.out), "its output")
    as_started = f"as started {[str(script), 'x']}"
    await until(lambda: as_started.encode() in bytes(host.out), "its words, as Python has them")


@conversation
async def test_a_process_with_another_environment_is_restarted_and_the_reason_is_logged(host):
    host.launcher.agent.prepared.modules = "auto"
    command = [sys.executable, "-c", "pass"]
    host.launcher.start(A, command, {"PATH": os.environ["PATH"]})
    await host.exit()
    assert not host.launcher.agent.prepared._kept  # nobody can tell what that imports
    script = host.folder / "script.py"
    script.write_text("")
    host.start(A, [sys.executable, str(script)])
    await host.exit()
    ready = await waits(host)
    host.start(B, [sys.executable, str(script)], OMP_NUM_THREADS="3")
    assert host.launcher.agent.pid(B) != ready
    assert (await host.exit()).code == 0
    [line] = [line for line in host.log if wording.PRELOADED_PROCESS in line]
    assert line.endswith(wording.NOT_FROM_PREPARED_PROCESS)
    await until(lambda: not psutil.pid_exists(ready), "its end, which the driver does not wait for")


@conversation
async def test_dead_prepared_process_does_not_prevent_a_start(host):
    script = await has_run_an_empty_script(host)
    ready = await waits(host)
    os.kill(ready, signal.SIGKILL)
    os.waitid(os.P_PID, ready, os.WEXITED | os.WNOWAIT)
    host.start(B, [sys.executable, str(script)])
    assert (await host.exit()).code == 0


@pytest.mark.parametrize(
    ("command", "found"),
    [
        ("python train.py --lr 1", ("python", False, ["train.py", "--lr", "1"])),
        ("/opt/bin/python3.11 -u train.py", ("/opt/bin/python3.11", True, ["train.py"])),
        ("python -m pkg.train -u", ("python", False, ["-m", "pkg.train", "-u"])),
        ("python -O train.py", None),
        ("python -c pass", None),
        ("python", None),
        ("bash run.sh", None),
        ("./train.py", None),
    ],
)
def test_only_plain_commands_of_python_are_prepared(command, found):
    assert preloaded_pool.plain(command.split()) == found


@pytest.mark.parametrize(
    ("source", "found"),
    [
        (
            '"""Words."""\nfrom __future__ import annotations\nimport a.b, c\nfrom d import e\n',
            (["a.b", "c", "d"], True),
        ),
        ("import os\nos.environ['X'] = '1'\nimport late\n", (["os"], False)),
        ("import a\nimport settings\nimport late\n", (["a"], False)),
        ("import a\nfrom settings.b import c\nimport late\n", (["a"], False)),
        ("import a\nfrom . import x\nimport late\n", (["a"], False)),
        ("if True:\n    import late\n", ([], False)),
    ],
)
def test_leading_imports_end_at_the_first_statement_that_may_affect_an_import(source, found):
    assert leading_imports(source, {"settings"}) == found


def test_leading_imports_of_a_module_include_imports_of_its_packages(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    package = tmp_path / "a_package" / "within"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").write_text("import first\n")
    (package / "__init__.py").write_text("import second\n")
    (package / "train.py").write_text("import third\nimport a_package\nimport late\n")
    (package / "__main__.py").write_text("import fourth\n")
    run = "-m a_package.within"
    assert script_imports(f"{run}.train", str(tmp_path)) == ["first", "second", "third"]
    assert script_imports(run, str(tmp_path)) == ["first", "second", "fourth"]
    (package.parent / "__init__.py").write_text("import first\nfirst.choose()\n")
    assert script_imports(run, str(tmp_path)) == ["first"]
    assert script_imports("-m no_such_package.train", str(tmp_path)) == []


def modules_after(words: str, script: Path) -> set[str]:
    """Return the modules of a process with this request."""
    code = (
        "import sys; from elastic.driver.processes.preloaded_program import prepare; prepare(*sys.argv[1:]);"
        "print(*{'torch', 'torch._dynamo', 'elastic.run_loop'} & sys.modules.keys())"
    )
    command = [sys.executable, "-c", code, words, str(script), str(script.parent)]
    return {*subprocess.check_output(command, text=True, timeout=120).split()}


@pytest.mark.nightly
def test_auto_preloads_torch_only_when_the_script_imports_torch_first(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("import os\nos.environ['TORCH_LOGS'] = 'all'\nimport torch\n")
    assert modules_after("auto", script) == set()
    assert modules_after("auto,torch", script) == {"torch", "torch._dynamo", "elastic.run_loop"}
    script.write_text("import os\nimport torch\nos.environ['A'] = 'b'\n")
    assert modules_after("auto", script) == {"torch", "torch._dynamo", "elastic.run_loop"}


@conversation
async def test_no_process_is_prepared_while_the_host_is_short_of_memory(host):
    kept = host.launcher.agent.prepared
    free = [preloaded_pool.AVAILABLE_BYTES_MIN - 1]
    kept._available = lambda: free[0]
    script = await has_run_an_empty_script(host)
    await until(lambda: any("memory" in line for line in host.log), "the reason")
    assert not kept._kept
    free[0] += 1
    host.start(B, [sys.executable, str(script)])
    assert (await host.exit()).code == 0
    await waits(host)


def one_that_waits(training) -> psutil.Process:
    """The job's, once it waits to become a worker."""

    def ready() -> list[psutil.Process]:
        children = psutil.Process(training.driver.pid).children()
        return [each for each in children if "preloaded_program" in " ".join(each.cmdline())]

    def waits() -> bool:
        return any(waits_at_its_pipe(each.pid) for each in ready())

    training.until(waits, "one that waits", 60)
    [waiting] = ready()
    return waiting


def test_replacement_worker_uses_the_prepared_process(job, tmp_path):
    flags = f"-np 2 --min-np 1 --preload auto --checkpoint-dir {tmp_path}"
    training = job(flags, ["python", str(SCRIPTS / "durable.py")])
    training.wait_for("rank 0 begins at 0")

    waiting = one_that_waits(training)
    training.kill(1)
    training.wait_for_world(1)
    training.wait_for_world(2)
    assert training.pid(1) == waiting.pid
    (tmp_path / "enough").touch()
    assert training.wait(60) == 0


@pytest.mark.nightly
def test_one_of_several_lost_workers_uses_the_prepared_process_and_all_are_replaced(job, tmp_path):
    flags = "-np 3 --min-np 1 --preload auto --blacklist-cooldown-range 0.1 0.2"
    training = job(f"{flags} --checkpoint-dir {tmp_path}", ["python", str(SCRIPTS / "durable.py")])
    training.wait_for("rank 0 begins at 0")

    waiting = one_that_waits(training)
    lost = [training.pid(rank) for rank in (1, 2)]
    for pid in lost:
        os.kill(pid, signal.SIGKILL)
    training.wait_for_world(1)
    training.wait_for_world(3, timeout=60)
    members = {training.pid(rank) for rank in range(3)}
    assert waiting.pid in members and not members & {*lost}
    (tmp_path / "enough").touch()
    assert training.wait(60) == 0


@conversation
async def test_the_requested_number_is_kept_and_unneeded_processes_are_released(host):
    told: list[str] = []
    reaper = host.launcher.agent._reaper
    tell = reaper.send

    def heard(line: str) -> None:
        told.append(line)
        tell(line)

    reaper.send = heard
    script = await has_run_an_empty_script(host, "auto,2")
    first, second = await all_wait(host, 2)
    host.start(B, [sys.executable, str(script)])
    assert host.launcher.agent.pid(B) == first
    host.launcher.agent.prepared.close()
    assert f"-{second}\n" in told and not psutil.pid_exists(second)
    assert (await host.exit()).code == 0
