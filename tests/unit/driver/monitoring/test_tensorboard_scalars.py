"""TensorBoard scalars: reports and decisions are compared with the values that TensorBoard would read."""

from __future__ import annotations

import importlib.util
import struct
from pathlib import Path

import pytest
from tensorboardX.proto.event_pb2 import Event

from elastic.driver.events import PublishWorld, ReportRecovery, TimePassed
from elastic.driver.monitoring.tensorboard_scalars import (
    JOB,
    Scalar,
    ScalarsOfReports,
    TensorBoard,
    of_actions,
)
from elastic.driver.reasons import as_sentence
from elastic.errors import Invalid
from elastic.protocol.messages import Address
from elastic.protocol.report_values import Metrics, Report

RECOVERED = ReportRecovery(3, "recovery", as_sentence("lost h:1#1"), 2, 68.0, {}, 0)
PUBLISHED = PublishWorld(3, [], Address("h", 1), 0, None, as_sentence("lost h:1#1"))


def silent(level: str, text: str) -> None:
    raise AssertionError(text)


def report(rank: int, metrics: Metrics) -> Report:
    return Report(rank, 2, 1, "h:0#1", metrics, 5.0)


def read(folder: Path) -> list[tuple[str, float, int, float]]:
    """Return tag, value, step and time of each scalar in the only file, decoded like TensorBoard's records."""
    [file] = folder.iterdir()
    found, data = [], file.read_bytes()
    while data:
        (length,) = struct.unpack_from("<Q", data)
        event = Event.FromString(data[12 : 12 + length])
        for value in event.summary.value:
            found.append((value.tag, value.simple_value, event.step, event.wall_time))
        data = data[16 + length :]
    return found


def test_numbers_are_scalars_at_the_reported_step():
    metrics = {"step": 40, "loss": 0.5, "done": True, "note": "warm", "eval": {"accuracy": 0.25}}
    assert ScalarsOfReports().of(report(1, metrics)) == [
        Scalar("rank-1", "step", 40.0, 40, 5.0),
        Scalar("rank-1", "loss", 0.5, 40, 5.0),
        Scalar("rank-1", "eval/accuracy", 0.25, 40, 5.0),
    ]


def test_reports_without_a_step_are_counted_per_rank():
    reports = ScalarsOfReports()
    scalars = [reports.of(report(rank, {"loss": 1.0})) for rank in (0, 0, 1)]
    assert [(each.run, each.step) for [each] in scalars] == [
        ("rank-0", 0),
        ("rank-0", 1),
        ("rank-1", 0),
    ]


@pytest.mark.parametrize("step", [float("nan"), float("inf"), "40", None, True])
def test_invalid_step_is_not_used(step):
    [*_, loss] = ScalarsOfReports().of(report(0, {"step": step, "loss": 1.0}))
    assert (loss.tag, loss.step) == ("loss", 0)


def test_recoveries_and_worlds_are_scalars_of_the_job():
    assert of_actions([PUBLISHED, RECOVERED], 7.0) == [
        Scalar(JOB, "elastic/workers", 0.0, 3, 7.0),
        Scalar(JOB, "elastic/recovery_ms", 68.0, 3, 7.0),
    ]


def test_scalars_are_flushed_when_the_job_ends(tmp_path):
    board = TensorBoard(tmp_path, silent)
    board.report(report(0, {"step": 1, "loss": 2.5}))
    board.report(report(1, {"step": 1, "loss": 3.5}))
    board.happened(TimePassed(), [RECOVERED], 7.0)
    board.close()
    assert read(tmp_path / "rank-0") == [("step", 1.0, 1, 5.0), ("loss", 2.5, 1, 5.0)]
    assert read(tmp_path / "rank-1")[1] == ("loss", 3.5, 1, 5.0)
    [(tag, value, step, _)] = read(tmp_path / JOB)
    assert (tag, value, step) == ("elastic/recovery_ms", 68.0, 3)


def test_unwritable_folder_is_logged_once(tmp_path):
    (tmp_path / "rank-0").write_text("a file")
    log: list[str] = []
    board = TensorBoard(tmp_path, lambda level, text: log.append(level))
    for _ in range(3):
        board.report(report(0, {"loss": 1.0}))
    board.close()
    assert log == ["warning"]


def test_missing_writer_is_an_error_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(Invalid):
        TensorBoard(tmp_path, silent)
