"""Output of `elasticrun explain` for real failed jobs, kept journals and invalid files."""

from __future__ import annotations

import fcntl
import json
from pathlib import Path

import msgspec
import pytest

from elastic.driver.commandline.offline import explain_cli
from elastic.driver.commandline.offline.explain_cli import as_json, as_text
from elastic.driver.commandline.offline.replay_cli import model_of
from elastic.driver.commandline.running_jobs import job_tables
from elastic.driver.events import HostsChanged
from elastic.driver.job.operator_api.runtime_folder import JobRecord, PublishedRecord
from elastic.driver.journal.entries import ABANDONED, TroubleLine, decoded, decoded_header, encoded
from elastic.driver.journal.file_journal import FileJournal
from elastic.driver.journal.journal import read
from elastic.driver.monitoring.explain.findings import FindingKind, findings, root_cause, time_facts
from elastic.driver.monitoring.explain.journal_file import JournalReading, read_journal
from elastic.driver.monitoring.explain.loss_causes import Cause, kind_of, last_exception
from elastic.driver.monitoring.explain.sentences import duration, sentence
from elastic.driver.monitoring.time_accounting import STRETCHES
from elastic.driver.reasons import ReasonKind, because
from elastic.driver.settings import Settings, StartCheckpoint
from elastic.errors import Invalid
from harness.golden import raises, recorded, visible
from harness.kept_journals import KEPT, unpacked

HERE = Path(__file__).parent
# Ten jobs that were made to fail, on one machine or on two hosts with etcd; folders in them were renamed. For each: the
# worker that was lost first, and words that its first three lines must contain.
JOBS = {
    "exception": (Cause.EXCEPTION, ["ValueError: sample 20 is damaged", "localhost:1#1"]),
    "out-of-memory": (Cause.OUT_OF_MEMORY, ["ran out of memory", "1.5 GB", "localhost:1#1"]),
    "killed": (Cause.SIGNAL, ["SIGKILL", "localhost:2#1", "3 workers: it had 2"]),
    "host-lost": (Cause.HOST_LOST, ["Host 127.0.0.2 was lost", "2 workers: it had 1"]),
    "disk-full": (Cause.WRITE_FAILED, ["its disk is full", "localhost:0#1"]),
    "mismatch": (Cause.MISMATCH, ["mismatched tensors", "rank 1 has [any, 2]"]),
    "stuck": (Cause.STUCK, ["stuck", "'gradients'", "rank 1"]),
    "frozen": (Cause.FROZEN, ["frozen", "SIGSTOP", "localhost:1#1"]),
    "start-failure": (Cause.MISSING_MODULE, ["No module named 'transformerz'", "before training"]),
    "etcd-gone": (
        Cause.SIGNAL,
        [
            "the job lost etcd, without which its driver makes no decisions: etcd at 127.0.0.1:24790 stopped",
            "the journal ends 3.8 s after etcd was lost",
            "then, 3.8 s after etcd was lost: rank 1",
        ],
    ),
}


def job(name: str, folder: Path) -> JournalReading:
    return read_journal(unpacked(HERE / "jobs" / f"{name}.jsonl.xz", folder))


@pytest.mark.parametrize("name", JOBS)
def test_first_three_lines_name_the_cause(name, tmp_path):
    reading = job(name, tmp_path)
    cause, words = JOBS[name]
    first = root_cause(reading.story)
    assert first is not None and first.cause is cause
    head = "\n".join(as_text(reading)[:3])
    for each in words:
        assert each.lower() in head.lower()
    assert any(
        finding.what is FindingKind.ADVICE for finding in findings(reading.story, reading.source)
    )


def test_rank_that_is_lost_each_time_is_named(tmp_path):
    recorded("explain", as_text(job("stuck", tmp_path)))


@pytest.mark.parametrize("name", JOBS)
def test_traceback_is_shown_once(name, tmp_path):
    text = "\n".join(as_text(job(name, tmp_path)))
    assert text.count("(most recent call last)") <= 2  # an exception may have a cause
    assert ("Traceback" in text) is (
        name in ("exception", "disk-full", "mismatch", "start-failure")
    )


@pytest.mark.parametrize("name", JOBS)
def test_reported_times_equal_the_summary_and_add_up(name, tmp_path):
    reading = job(name, tmp_path)
    facts, spent = time_facts(reading.story), reading.story.spent
    assert facts["job"] == {stretch: spent.stretches()[stretch] for stretch in STRETCHES}
    assert facts["job_s"] == pytest.approx(
        reading.story.last - (reading.story.began or 0.0), rel=1e-3
    )
    assert facts["workers"] == msgspec.structs.asdict(spent.total())


def test_duplicate_ranks_and_empty_parts_are_handled(tmp_path):
    text = "\n".join(as_text(job("exception", tmp_path)))
    assert "Rank 1 of 3 (localhost:1#1)" in text and "Rank 1 of 2 (localhost:2#1)" in text
    assert "idle" in text and "storage" not in text and "(0 times)" not in text


@pytest.mark.parametrize("name", JOBS)
def test_json_has_the_same_findings(name, tmp_path):
    decoded = json.loads(as_json(job(name, tmp_path)))
    assert {"section", "what", "facts", "text"} == set(decoded["findings"][0])


def test_kept_journals_are_explained(tmp_path):
    journals = sorted(KEPT.glob("*.xz"))
    assert len(journals) > 10
    for kept in journals:
        reading = read_journal(unpacked(kept, tmp_path))
        first = findings(reading.story, reading.source)[0].what
        assert as_text(reading) and not reading.source.left_out, kept
        if reading.story.view.end is not None:
            stopped = first is FindingKind.STOPPED
            assert stopped or first is (
                FindingKind.FAILED if reading.story.code else FindingKind.DONE
            ), kept


def test_checkpoint_from_which_a_job_resumed_is_explained(tmp_path):
    journal = unpacked(HERE / "jobs" / "killed.jsonl.xz", tmp_path)
    head, rest = journal.read_bytes().split(b"\n", 1)
    begins = StartCheckpoint("r0001-g0002-c00000300", "/checkpoints", 300)
    kinds = []
    for header in (
        decoded_header(head),
        msgspec.structs.replace(decoded_header(head), begins=begins),
    ):
        journal.write_bytes(encoded(header) + rest)
        reading = read_journal(journal)
        found = findings(reading.story, reading.source)
        kinds.append([each for each in found if each.what is FindingKind.RESUMED_FROM])
        page = model_of(reading, journal)
        facts = None if header.begins is None else msgspec.structs.asdict(begins)
        assert page.state.values["begins"] == facts
    before, [after] = kinds
    assert not before and after.facts == msgspec.structs.asdict(begins)
    recorded("explain", sentence(after))
    page.view.note(HostsChanged({}), [], 0.0)
    [line] = [each for each in job_tables.status(page.full(1.0)) if begins.name in each]
    recorded("messages", line)
    # A driver that takes over a job whose workers still train.
    for view in (page.view, reading.view):
        view.adopt({}, 1, 2.0)
    assert page.state.values["begins"] is None and reading.story.begins is None


@pytest.mark.parametrize("name", ["host-lost", "stuck"])
def test_journal_truncated_anywhere_is_explained(name, tmp_path):
    whole = unpacked(HERE / "jobs" / f"{name}.jsonl.xz", tmp_path).read_bytes()
    file = tmp_path / "cut"
    for end in range(whole.index(b"\n") + 1, len(whole), 997):
        file.write_bytes(whole[:end])
        assert as_text(read_journal(file))


def test_incomplete_journal_is_reported_as_incomplete(tmp_path):
    file = unpacked(HERE / "jobs" / "killed.jsonl.xz", tmp_path)
    file.write_bytes(file.read_bytes()[: file.read_bytes().index(b'{"type":"EndJob"')])
    lines = as_text(read_journal(file))
    recorded("explain", lines[0])
    assert "SIGKILL" in lines[1]
    recorded("explain", lines[-1].strip())
    with open(file) as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        recorded("explain", as_text(read_journal(file))[0])


def test_invalid_lines_are_skipped_and_counted(tmp_path):
    file = unpacked(HERE / "jobs" / "killed.jsonl.xz", tmp_path)
    lines = file.read_bytes().splitlines(keepends=True)
    lines[5:5] = [b"\xff\x00 garbage\n", b'{"at": 1, "event": {"type": "Unheard"}}\n', b"[]\n"]
    file.write_bytes(b"".join(lines))
    recorded("explain", as_text(read_journal(file))[-1])


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x89PNG\r\n\x1a\n\x00\x00",
        b"\x00" * 5_000_000,
        b'{"journal": 99, "date": "", "settings": {}}\n',
        b'{"journal": 2, "date": "", "settings": {}}\n' + b"what\n" * 200,
        b'{"loss": 1.0}\n',
    ],
)
def test_file_that_is_not_a_journal_is_rejected(data, tmp_path):
    file = tmp_path / "file"
    file.write_bytes(data)
    with raises(Invalid) as refused:
        read_journal(file)
    assert len(str(refused.value)) < 400


def test_unreadable_file_is_rejected(tmp_path):
    for path in [tmp_path, tmp_path / "none"]:
        with raises(Invalid):
            explain_cli.main([str(path)], {})
    with raises(Invalid):
        explain_cli.main([], {})


def test_running_job_when_its_name_is_given_then_its_journal_is_explained(tmp_path, capsys):
    environ = {"XDG_RUNTIME_DIR": str(tmp_path)}
    journal = unpacked(HERE / "jobs" / "exception.jsonl.xz", tmp_path)
    jobs = [
        PublishedRecord(environ, JobRecord(name, pid, "127.0.0.1:1", "", journal=path))
        for name, pid, path in (("bert", 1, str(journal)), ("gpt", 2, ""))
    ]
    assert explain_cli.main(["bert"], environ) == 0
    assert capsys.readouterr().out
    with raises(Invalid, "gpt"):
        explain_cli.main(["gpt"], environ)
    for each in jobs:
        each.close()


def test_terminal_control_characters_are_escaped(tmp_path, capsys):
    file = unpacked(HERE / "jobs" / "exception.jsonl.xz", tmp_path)
    evil = rb"\u001b[2J\u001b]0;owned\u0007\u202e"
    file.write_bytes(file.read_bytes().replace(b"sample 20", evil))
    assert explain_cli.main([str(file)], {}) == 0
    shown = capsys.readouterr().out
    assert "\x1b" not in shown and "\u202e" not in shown and r"\x1b[2J" in shown


def test_page_and_json_are_written(tmp_path, capsys):
    file = unpacked(HERE / "jobs" / "exception.jsonl.xz", tmp_path)
    assert explain_cli.main([str(file), "--html", str(tmp_path / "p.html"), "--json"], {}) == 0
    assert json.loads(capsys.readouterr().out)["findings"]
    recorded("explain", visible((tmp_path / "p.html").read_text()))


def test_journal_with_a_write_error_is_explained(tmp_path):
    file = unpacked(HERE / "jobs" / "killed.jsonl.xz", tmp_path)
    data = file.read_bytes()
    file.write_bytes(data.replace(b'{"journal":2', b'{"journal":%d' % ABANDONED, 1))
    recorded("explain", as_text(read_journal(file))[-1])


def test_file_journal_reports_an_etcd_outage(tmp_path):
    file = tmp_path / "journal"
    journal = FileJournal.begin(file, Settings(np=1, workers_min=1, workers_max=1, elastic=True))
    journal.record(1.0, HostsChanged({"h": 1}))
    journal.trouble(2.0, because(ReasonKind.STORE_SILENT, store="e:1", text="connection refused"))
    journal.record(5.0, HostsChanged({}))
    journal.close()
    assert read(file)[1], "who reads entries does not stumble over it"
    text = "\n".join(as_text(read_journal(file)))
    recorded("explain", text)


def test_etcd_outage_that_ended_is_not_a_cause(tmp_path):
    file = unpacked(HERE / "jobs" / "etcd-gone.jsonl.xz", tmp_path)
    silent = next(
        line
        for line in map(decoded, file.read_bytes().splitlines()[1:])
        if isinstance(line, TroubleLine)
    )
    back = TroubleLine(
        because(ReasonKind.STORE_BACK, store="127.0.0.1:24790", silent_s=5.5), silent.at + 5.5
    )
    file.write_bytes(file.read_bytes() + encoded(back))
    text = "\n".join(as_text(read_journal(file)))
    recorded("explain", text)


@pytest.mark.parametrize(
    ("summary", "trace", "cause"),
    [
        ("OSError: [Errno 28] No space left on device: 'a.pt'", "", Cause.DISK_FULL),
        ("RuntimeError: cannot save", "OSError: [Errno 28] No space", Cause.DISK_FULL),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate", "", Cause.GPU_MEMORY),
        ("RuntimeError: CUDA error: an illegal memory access", "", Cause.GPU_ERROR),
        ("torch.distributed.DistBackendError: NCCL error in: x", "", Cause.GPU_ERROR),
        ("MemoryError", "", Cause.MEMORY_ERROR),
        ("elastic.errors.CollectiveFailed: rank 1 left", "", Cause.LOST_PEER),
        ("KeyError: 'MemoryError'", "", Cause.EXCEPTION),
    ],
)
def test_exception_is_classified(summary, trace, cause):
    assert kind_of(summary, trace) is cause


def test_last_exception_of_the_output_is_found():
    wrote = """\
Traceback (most recent call last):
  File "a.py", line 1, in f
KeyError: 1

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "a.py", line 2, in g
ValueError: two
[W] a library says goodbye
"""
    summary, trace = last_exception(wrote)
    assert summary == "ValueError: two"
    assert trace.startswith("Traceback") and "KeyError" in trace and "goodbye" not in trace
    assert last_exception("Segmentation fault") == ("", "")
    by_torch = "".join(
        f"[rank1]: {line}" for line in wrote.splitlines(keepends=True) if line.strip()
    )
    assert last_exception(by_torch)[0] == "ValueError: two"


def test_times_are_shown_in_suitable_units():
    shown = [duration(each) for each in (0.04, 59.94, 252.4, 7384.0)]
    assert shown == ["0.0 s", "59.9 s", "4 min 12 s", "2 h 3 min"]


def test_every_kind_of_finding_has_a_sentence(tmp_path):
    kinds = set()
    for kept in [*(HERE / "jobs").iterdir(), *KEPT.glob("*.xz")]:
        reading = read_journal(unpacked(kept, tmp_path))
        for finding in findings(reading.story, reading.source):
            assert sentence(finding).strip()
            kinds.add(finding.what)
    assert len(kinds) > 15
