"""Cleanup of a killed driver's agents when a new job replaces the driver's job."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path

from elastic.driver.agents.agent_manager import AGENTS, CLOSE_S
from elastic.driver.agents.agent_pool import CALL_S, silence_s
from elastic.driver.agents.messages import AgentId, Detach
from elastic.driver.job.job import Job
from elastic.driver.job.multi_host_plan import MultiHostPlan
from elastic.driver.journal.file_journal import FileArchive
from elastic.driver.network.control_server import ControlServer
from elastic.driver.network.host_lists import parse_address
from elastic.driver.output_interfaces import Log
from elastic.errors import Invalid


async def end(job: Job, plan: MultiHostPlan, path: str, listed: Iterable[str], log: Log) -> None:
    """Detach the agents of an earlier job, as its driver would have done at the end of the job.

    The agents still try to connect to the address of the killed driver, so this function listens there. It waits,
    within a time limit, until the agents have killed their workers.

    Args:
        path: journal of the earlier job.
        listed: hosts of the new job.
    """
    if plan.etcd or plan.provider or plan.agents_come:
        # These agents will find the new driver without help, and will kill the old workers before they serve the new
        # job.
        return
    archive = FileArchive(Path(path))
    try:
        header = archive.header()
        address = header.writer.address if header is not None and header.outlives else ""
        if not address:
            return
        past = await archive.past()
        if past is None or past.over:
            return
        hosts = {worker.host for worker in past.membership.roster}
    except Invalid:  # the end of the journal may be missing, for example after a full disk
        hosts = set(listed)
    finally:
        archive.close()
    called: set[str] = set()
    here: set[AgentId] = set()
    server = ControlServer(
        secret=plan.secret,
        log=log,
        callers=AGENTS,
        lease_s=silence_s(job.settings.lease_s),
        tls=plan.server_tls(),
    )

    def accepted(agent: AgentId) -> None:
        called.add(agent.host)
        here.add(agent)
        server.send(agent, Detach("another job has started"))

    now = asyncio.get_running_loop().time
    began = now()
    try:
        await server.open(
            *parse_address(address),
            received=lambda agent, message: None,
            gone=lambda agent, silent: here.discard(agent),
            expected=lambda agent: True,
            accepted=accepted,
        )
        while (here or hosts - called) and now() - began < (CLOSE_S if here else CALL_S):
            await asyncio.sleep(0.005)
    except OSError:
        pass  # another process listens on the address
    finally:
        await server.close()
    if missing := ", ".join(sorted(hosts - called)):
        log(
            "warning",
            f"no agent connected from {missing}; workers there exit after the --driver-timeout of the previous job",
        )
