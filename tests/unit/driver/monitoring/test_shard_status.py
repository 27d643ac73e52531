"""What the log, explain, status and the page say about a sharded job, from the journal of a real one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from elastic.driver.commandline.running_jobs import job_tables
from elastic.driver.events import ReportRecovery, ShardsDivided
from elastic.driver.journal.entries import Entry
from elastic.driver.journal.journal import read
from elastic.driver.monitoring.dashboard.page_model import PageModel
from elastic.driver.monitoring.explain.findings import FindingKind, JournalState, findings
from elastic.driver.monitoring.explain.job_history import JobHistory
from elastic.driver.monitoring.explain.sentences import sentence
from elastic.driver.monitoring.job_view import JobView
from elastic.driver.monitoring.shard_status import as_sentence, recovery_facts, source_sentence
from elastic.driver.monitoring.time_accounting import TimeSpent
from elastic.driver.monitoring.world_log_lines import recovery_line
from elastic.protocol.messages import Commit, RowBytes
from harness.golden import recorded
from harness.kept_journals import SHARDED, unpacked


@pytest.fixture(scope="module")
def entries(tmp_path_factory: pytest.TempPathFactory) -> list[Entry]:
    return read(unpacked(SHARDED, tmp_path_factory.mktemp("kept")))[1]


def recoveries(entries: Iterable[Entry]) -> list[ReportRecovery]:
    reports = [a for each in entries for a in each.actions if isinstance(a, ReportRecovery)]
    return [each for each in reports if each.kind == "recovery"]


def test_recovery_reports_the_lost_shard_and_its_source_in_host_memory(entries):
    first, second = recoveries(entries)
    assert first.shards is not None and second.shards is not None
    assert (first.shards.shards, first.shards.copy_hosts, first.shards.lost) == (3, 0, (0,))
    assert first.shards.lost_rows.host > 0 == first.shards.received
    assert first.shards.lost_rows.network == first.shards.lost_rows.checkpoint == 0
    assert first.shards.restored is not None and first.shards.restored.generation == 2
    assert len(second.shards.lost) == 1
    line = recovery_line(first, held=True)
    assert str(first.shards.restored) in line
    recorded("log", line.partition("; ")[2])


def test_explain_shows_the_division_the_sealed_step_and_the_source_of_each_lost_shard(entries):
    story = JobHistory(TimeSpent(JobView()))
    for each in entries:
        story.view.note(each.event, each.actions, each.at)
    found = findings(story, JournalState(None))
    (sharded,) = [each for each in found if each.what is FindingKind.SHARDED]
    assert (
        sharded.facts is not None and sharded.facts["workers"] == 4 and sharded.facts["step"] == 24
    )
    lost = [each.facts["shards"]["lost"] for each in found if each.what is FindingKind.INCIDENT]
    assert [len(each) for each in lost] == [1, 1]
    recorded("explain", sentence(sharded))


def test_page_and_status_show_the_division_and_the_last_recovery(entries):
    page = PageModel(TimeSpent(JobView()), name="gpt", command=["train.py"], least=2, most=4)
    before: dict[str, Any] = dict(page.state.values)
    assert before["shards"] is None
    for each in entries:
        page.view.note(each.event, each.actions, each.at)
    shown = page.state.values["shards"]
    assert (shown["workers"], shown["shards"], shown["copy_hosts"], shown["step"]) == (4, 4, 0, 24)
    lines = job_tables.status(page.full(entries[-1].at))
    assert f"  {shown['text']}" in lines
    last = [each for each in page.state.series["recoveries"] if each["kind"] == "recovery"][-1]
    assert last["shards"] and sum(line.endswith(last["shards"]) for line in lines) == 1


def divided(**fields: object) -> ShardsDivided:
    given = {
        "shards": 4,
        "copy_hosts": 1,
        "restored": Commit(2, 5),
        "rows": RowBytes(),
        "received": 0,
    }
    return ShardsDivided(**given | fields)  # type: ignore[arg-type]


def test_sentences_name_each_source():
    facts = {"workers": 6, "shards": 3, "copy_hosts": 1, "sealed": "g2c5", "step": None}
    found = [
        as_sentence(facts),
        as_sentence({**facts, "shards": 6, "copy_hosts": 0, "step": 120}),
        as_sentence({**facts, "copy_hosts": 2, "sealed": None}),
    ]
    for each in (
        divided(lost=(2,), lost_rows=RowBytes(memory=64)),
        divided(lost=(1, 2), lost_rows=RowBytes(host=64, network=128), received=128),
        divided(lost=tuple(range(20)), lost_rows=RowBytes(network=5_000_000), received=5_000_000),
        divided(restored=None, rows=RowBytes(checkpoint=3_000_000)),
    ):
        found.append(source_sentence(recovery_facts(each)))
    recorded("explain", found)
    assert not source_sentence(recovery_facts(divided())) and not source_sentence(None)
