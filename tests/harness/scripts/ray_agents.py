"""Starts agents on the nodes of a Ray cluster and injects faults; prints observations as lines ``NAME {...}``.

ray_agents.py FOLDER PART     # FOLDER: of the user's program, which Ray brings to the nodes; PART: agents, dead-node
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import ray

sys.path.append(str(Path(__file__).parents[2]))
from elastic.driver.agents.agent_manager import AGENTS, AgentManager
from elastic.driver.agents.messages import Attach
from elastic.driver.events import HostLost
from elastic.driver.launch.starter import Bootstrap, StartFailed
from elastic.driver.network.control_server import ControlServer
from elastic.driver.processes.worker_output import Output
from elastic.driver.ray.actors import RayActors
from elastic.driver.ray.starter import RayStarter, name_of
from elastic.protocol.messages import Worker
from harness.ports import free_port
from harness.processes import lives

SECRET = b"s" * 32
JOB = "agents"
DEADLINE_S = 40.0
LOOKS = """
import json, os, sys
import helper  # the user's
joined = {}
if sys.argv[1:] == ["joins"]:
    import ray
    ray.init(log_to_driver=False, namespace=os.environ["RAY_NAMESPACE"])
    joined = {"nodes": sum(node["Alive"] for node in ray.nodes()), "namespace": ray.get_runtime_context().namespace}
print("LOOK", json.dumps({
    "pid": os.getpid(), "agent": os.getppid(), "cwd": os.getcwd(), "python": sys.executable, "helper": helper.__file__,
    "environ": dict(os.environ), "path": sys.path, "joined": joined,
    "call": open(os.environ["ELASTIC_CALL"], "rb").read().decode(),
}), flush=True)
import time
time.sleep(600)
"""


def say(name: str, **facts: Any) -> None:
    print(name, json.dumps(facts), flush=True)


async def until(true: Callable[[], Any], awaited: str) -> float:
    begun = time.monotonic()
    while not true():
        assert time.monotonic() - begun < DEADLINE_S, f"waited {DEADLINE_S} s for {awaited}"
        await asyncio.sleep(0.01)
    return time.monotonic() - begun


class Lag:
    """Return the longest time without another task of the event loop."""

    def __init__(self) -> None:
        self.most_s = 0.0
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while True:
            before = time.monotonic()
            await asyncio.sleep(0.01)
            self.most_s = max(self.most_s, time.monotonic() - before - 0.01)

    def end(self) -> float:
        self._task.cancel()
        return self.most_s


class Bench:
    """Two nodes, a fleet, and the output of its workers."""

    def __init__(self, nodes: dict[str, str]) -> None:
        self.nodes = nodes
        self.printed = bytearray()
        self.log: list[str] = []
        self.server = ControlServer(secret=SECRET, log=self.note, callers=AGENTS)
        self.address = self.server.bind("127.0.0.1")
        self.starter = self.new_starter(JOB)
        output = Output(
            place_of=lambda w: None, stdout=self.printed.extend, stderr=self.printed.extend
        )
        self.fleet = AgentManager(
            self.server,
            attach=Attach(JOB, 1, 2.0, 10.0),
            sink=output,
            log=self.note,
            starter=self.starter,
            reach=lambda host: self.bootstrap(host, [str(self.address)]),
            folder="/",
        )

    def note(self, level: str, text: str) -> None:
        self.log.append(f"{level}: {text}")

    def new_starter(self, job: str, **rest: Any) -> RayStarter:
        return RayStarter(
            self.nodes.__getitem__, b"the call", self.note, job=job, start_s=DEADLINE_S, **rest
        )

    def bootstrap(self, host: str, drivers: list[str]) -> Bootstrap:
        return Bootstrap(JOB, host, SECRET.hex(), drivers)

    async def look(self, worker: Worker, *words: str) -> dict[str, Any]:
        """Return the environment of a newly started worker."""
        before = self.printed.count(b"LOOK")
        self.fleet.start(worker, ["python", "-c", LOOKS, *words], {})
        await until(
            lambda: (
                self.printed.count(b"LOOK") > before
                and b"\n" in self.printed[self.printed.rfind(b"LOOK") :]
            ),
            f"{worker}: {bytes(self.printed).decode()} {self.log}",
        )
        text = bytes(self.printed[self.printed.rfind(b"LOOK") + 4 :]).decode()
        found: dict[str, Any] = json.loads(text.splitlines()[0])
        return found


async def agents_and_workers(bench: Bench, actors: RayActors) -> None:
    await bench.fleet.workers.open(
        "127.0.0.1",
        received=lambda worker, message: None,
        gone=lambda worker, silent: None,
        expected=lambda worker: True,
    )
    lost: list[Any] = []
    await bench.fleet.open(lambda exited: None, lost.append)
    left, right = Worker("left", 0), Worker("right", 0)

    seen = await bench.look(left)
    say("looked", nodes=bench.nodes, **seen)
    again = await bench.look(right, "joins")
    say(
        "joined",
        agent=again["agent"],
        actor=psutil.Process(again["agent"]).ppid(),
        **again["joined"],
    )
    say("placed", names=actors.names(), command=psutil.Process(seen["agent"]).cmdline())

    # The actor is killed.
    kept = Path(seen["environ"]["ELASTIC_CALL"]).parent
    ray.kill(ray.get_actor(name_of(JOB, "left")))
    took_s = await until(
        lambda: not lives(seen["agent"]) and not lives(seen["pid"]), "the end of agent and worker"
    )
    say("actor-killed", took_s=took_s)

    # A new one there first removes the remains.
    other = Worker("left", 1)
    await until(lambda: any(isinstance(each, HostLost) for each in lost), "the loss of the host")
    seen = await bench.look(other)
    say("again", swept=not kept.exists())

    # The agent is killed.
    actor = psutil.Process(seen["agent"]).ppid()
    folder_of_left = Path(seen["environ"]["ELASTIC_CALL"]).parent
    os.kill(seen["agent"], signal.SIGKILL)
    took_s = await until(lambda: not lives(actor), "the end of the actor")
    await until(lambda: name_of(JOB, "left") not in actors.names(), "Ray's noticing")
    say("agent-killed", took_s=took_s, folder=folder_of_left.exists(), log=bench.log)

    # A detached one gets the next driver's address.
    callers: asyncio.Queue[str] = asyncio.Queue()

    async def answer(name: str) -> tuple[asyncio.Server, str]:
        async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            callers.put_nowait(name)
            writer.close()

        listening = await asyncio.start_server(greet, "127.0.0.1")
        return listening, f"127.0.0.1:{listening.sockets[0].getsockname()[1]}"

    first, first_at = await answer("first")
    second, second_at = await answer("second")
    earlier = bench.new_starter("lasting", detached=True)
    await earlier.start(bench.bootstrap("left", [first_at]))
    assert await asyncio.wait_for(callers.get(), DEADLINE_S) == "first"
    await earlier.close()
    later = bench.new_starter("lasting", detached=True)
    await later.redirect([second_at])
    begun = time.monotonic()
    while await asyncio.wait_for(callers.get(), DEADLINE_S) != "second":
        pass
    say("redirected", took_s=time.monotonic() - begun, names=actors.names())
    lasting = actors.find(name_of("lasting", "left"))
    await asyncio.wrap_future(actors.ask(lasting, "end"))
    await until(lambda: name_of("lasting", "left") not in actors.names(), "the actor's leaving")
    await later.close()
    for server in (first, second):
        server.close()

    # Close everything that is left.
    agent, actor = again["agent"], psutil.Process(again["agent"]).ppid()
    files = [
        Path(opened.path).parent
        for opened in psutil.Process(actor).open_files()
        if opened.path.endswith("held-by-actor")
    ]
    begun = time.monotonic()
    await bench.fleet.close()
    took_s = time.monotonic() - begun
    alive = [lives(pid) for pid in (again["pid"], agent)]
    await until(lambda: not lives(actor), "the end of the actor")
    await bench.fleet.workers.close()
    say(
        "closed",
        took_s=took_s,
        alive=alive,
        folders=[str(each) for each in files],
        kept=[str(each) for each in files if each.exists()],
        names=actors.names(),
    )


async def node_dies(bench: Bench, actors: RayActors) -> None:
    """A node dies, and Ray has not noticed yet. The raylet of the second node is killed."""
    nowhere = [f"127.0.0.1:{free_port()}"]
    last = bench.new_starter("last")
    await last.start(bench.bootstrap("right", nowhere))
    actor = await asyncio.wrap_future(actors.ask(actors.find(name_of("last", "right")), "pid"))
    raylet = psutil.Process(actor).ppid()
    children = [child.pid for child in psutil.Process(actor).children()]
    os.kill(raylet, signal.SIGKILL)
    took_s = await until(
        lambda: not any(map(lives, [actor, *children])),
        "the end of the dead node's actor and agent",
    )
    lag = Lag()
    short = RayStarter(bench.nodes.__getitem__, b"", bench.note, job="short", start_s=3.0)
    begun, why = time.monotonic(), ""
    try:
        await short.start(bench.bootstrap("right", nowhere))
    except StartFailed as failed:
        why = str(failed)
    say(
        "node-died",
        took_s=took_s,
        agents=len(children),
        why=why,
        failed_s=time.monotonic() - begun,
        lag_s=lag.end(),
        log=bench.log,
    )
    await last.close()
    await short.close()


async def main(folder: str, part: str) -> None:
    ray.init(
        namespace="mine",
        log_to_driver=False,
        runtime_env={
            "working_dir": folder,
            "env_vars": {"MINE": "7", "PATH": "/users/own:${PATH}", "PYTHONBREAKPOINT": "0"},
        },
    )
    ids = [
        node["NodeID"]
        for node in ray.nodes()
        if node["Alive"] and node["Resources"].get("CPU", 0) > 0
    ]
    actors = RayActors()
    bench = Bench({"left": ids[0], "right": ids[1]})
    await {"agents": agents_and_workers, "dead-node": node_dies}[part](bench, actors)
    await until(lambda: not actors.names(), "the end of every actor")
    say("names", names=actors.names())
    ray.shutdown()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
