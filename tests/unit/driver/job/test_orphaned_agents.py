"""Agents left behind by an earlier job of the same name."""

from __future__ import annotations

from unittest.mock import create_autospec

import pytest

from elastic.driver.events import EndJob, HostsChanged
from elastic.driver.job import orphaned_agents
from elastic.driver.job.job import Job
from elastic.driver.job.multi_host_plan import MultiHostPlan
from elastic.driver.journal.entries import Writer, header_of
from elastic.driver.journal.file_journal import FileArchive
from elastic.driver.journal.recovered_job import RecoveredJob
from elastic.driver.membership.membership import Membership
from elastic.driver.reasons import as_sentence
from elastic.driver.settings import Settings
from elastic.errors import Invalid

NOT_OURS = "192.0.2.1:9"
SETTINGS = Settings(np=2, workers_min=1, workers_max=2, elastic=True)

HEADER = header_of(
    SETTINGS, job="a1", command=["x"], folder="/", writer=Writer(address=NOT_OURS), outlives=True
)


def past(*, hosts: dict[str, int], ended: bool = False) -> RecoveredJob:
    membership = Membership(SETTINGS)
    membership.handle(HostsChanged(hosts), 0.0)
    end = EndJob(0, as_sentence("because")) if ended else None
    return RecoveredJob(
        header=HEADER,
        settings=SETTINGS,
        writer=HEADER.writer,
        membership=membership,
        last_at=0.0,
        ended=end,
        replayed=0,
    )


@pytest.mark.parametrize(
    ("found", "connected", "expected"),
    [
        ([past(hosts={"g": 1, "h": 1})], False, ["no agent connected from g, h; "]),
        # They connect to the new driver, which ends their workers.
        ([past(hosts={"g": 1, "h": 1})], True, []),
        ([past(hosts={}, ended=True)], False, []),
        ([None], False, []),
        (Invalid("on a full disk"), False, ["no agent connected from k; "]),
    ],
)
async def test_agent_that_does_not_connect_is_named(found, connected, expected, monkeypatch):
    archive = create_autospec(FileArchive, instance=True)
    archive.past.side_effect = found
    archive.header.return_value = HEADER
    monkeypatch.setattr(orphaned_agents, "FileArchive", lambda path: archive)
    job, plan = create_autospec(Job, instance=True), create_autospec(MultiHostPlan, instance=True)
    job.settings, plan.secret = SETTINGS, bytes(32)
    plan.etcd, plan.provider, plan.agents_come = None, None, connected
    plan.server_tls.return_value = None
    lines: list[str] = []
    await orphaned_agents.end(job, plan, "journal", ["k"], lambda level, text: lines.append(text))
    assert [line.partition("; ")[0] + "; " for line in lines] == expected
    assert archive.close.called == (not connected)
