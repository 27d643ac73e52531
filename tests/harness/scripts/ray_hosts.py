"""Follows the hosts of one job on a Ray cluster, without any worker: prints the events of a driver.

    ray_hosts.py JOB '{"most": 4, "resources": {"CPU": 1}, "at_least": 2, "within_s": 30, "detached": false,
                       "bundles": [{"CPU": 1}, ...], "in_use": {"0": {"CPU": 1}}, "answer_s": 5}'

Lines: ``hosts [["host", slots, ["gpu", ...], "node"], ...]``, ``log level: text``, ``refused: ...``. SIGTERM closes.
With ``bundles`` the slots are in a group of our own.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys

import ray

from elastic.driver.ray.discovery import ClusterRequest, RayDiscovery
from elastic.errors import Invalid


def say(text: str) -> None:
    print(text, flush=True)


async def main(job: str, plan: dict) -> None:
    group = None
    if "bundles" in plan:
        group = ray.util.placement_group(plan["bundles"], name="theirs")
    in_use = {int(number): taken for number, taken in plan.get("in_use", {}).items()}
    wanted = ClusterRequest(plan["most"], plan["resources"], group, in_use)
    discovery = RayDiscovery(
        wanted,
        lambda level, text: say(f"log {level}: {text}"),
        job=job,
        detached=plan.get("detached", False),
        answer_s=plan.get("answer_s", 5.0),
        look_s=0.1,
    )
    asyncio.get_running_loop().add_signal_handler(
        signal.SIGTERM, lambda: closing.append(asyncio.ensure_future(discovery.close()))
    )
    closing: list[asyncio.Future[None]] = []
    try:
        await discovery.place(plan.get("at_least", 0), plan.get("within_s", 30))
    except Invalid as error:
        say(f"refused: {error}")
        return
    async for hosts in discovery.watch():
        rows = [
            (host, slots, discovery.gpus_of(host), discovery.node_of(host))
            for host, slots in hosts.items()
        ]
        say(f"hosts {json.dumps(rows)}")
    await asyncio.gather(*closing)
    if group is not None:
        say(f"group {ray.util.placement_group_table(group)['state']}")


if __name__ == "__main__":
    ray.init(namespace="tests", log_to_driver=False)
    asyncio.run(main(sys.argv[1], json.loads(sys.argv[2])))
    ray.shutdown()
    say("closed")
