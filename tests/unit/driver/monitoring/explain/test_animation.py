"""Animation of a job: well-formed, small, without scripts, and true to the job."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from elastic.driver.monitoring.explain.animation import CAPTIONS, COLOURS, FRAMES, KEYS, film
from elastic.driver.monitoring.explain.job_history import JobHistory
from elastic.driver.monitoring.explain.journal_file import JournalReading, read_journal
from elastic.driver.monitoring.explain.timeline_rows import WorkerRows
from elastic.driver.monitoring.job_view import JobView
from elastic.driver.monitoring.time_accounting import TimeSpent
from harness.golden import recorded
from harness.kept_journals import KEPT, unpacked
from unit.driver.monitoring.explain.test_explain import HERE, JOBS, job

SVG = "{http://www.w3.org/2000/svg}"
ALLOWED = {"svg", "title", "rect", "circle", "g", "text", "path", "line", "animate", "set"}


def parsed(reading: JournalReading) -> ElementTree.Element:
    return ElementTree.fromstring(film(reading.story, reading.rows))


def moving(root: ElementTree.Element) -> list[ElementTree.Element]:
    return list(root.iter(f"{SVG}animate"))


@pytest.mark.parametrize("name", JOBS)
def test_film_is_an_animated_svg_without_scripts(name, tmp_path):
    reading = job(name, tmp_path)
    root = parsed(reading)
    assert {element.tag.removeprefix(SVG) for element in root.iter()} <= ALLOWED
    names = {attribute for element in root.iter() for attribute in element.attrib}
    assert not any(name.startswith("on") or "href" in name for name in names)
    for each in moving(root):
        times = [float(time) for time in each.attrib["keyTimes"].split(";")]
        assert times == sorted(times) and times[0] == 0.0 and times[-1] <= 1.0
        assert len(times) == len(each.attrib["values"].split(";"))
        if each.attrib["calcMode"] == "linear":
            assert times[-1] == 1.0, "or a browser shows nothing of it"


def test_lost_worker_turns_dark_and_its_successor_is_shown(tmp_path):
    root = parsed(job("stuck", tmp_path))
    fills = [
        each.attrib["values"] for each in moving(root) if each.attrib["attributeName"] == "fill"
    ]
    assert len(fills) == 3, "one for each slot"
    gone = [f"{COLOURS['training']};{COLOURS['']};{COLOURS['starting']}" in each for each in fills]
    assert gone == [False, True, True]
    texts = [text.text or "" for text in root.iter(f"{SVG}text")]
    recorded("explain", texts)
    assert "4" in texts
    recorded("explain", texts)


def test_film_stays_small(tmp_path):
    for kept in KEPT.glob("*.xz"):
        reading = read_journal(unpacked(kept, tmp_path))
        assert len(film(reading.story, reading.rows).encode()) < 300_000
    assert (CAPTIONS * 250 + 4 * FRAMES * 160 + KEYS * 16 + 3 * 900 * 20) < 300_000, (
        "however long the job was"
    )


def test_markup_in_a_name_is_escaped(tmp_path):
    file = unpacked(Path(HERE / "jobs" / "killed.jsonl.xz"), tmp_path)
    file.write_bytes(file.read_bytes().replace(b'"localhost"', b'"<script>x</script>&"'))
    reading = read_journal(file)
    root = parsed(reading)
    assert not list(root.iter(f"{SVG}script"))
    assert re.search("&lt;script&gt;", film(reading.story, reading.rows, title="<script>"))


@pytest.mark.parametrize("name", JOBS)
def test_first_frame_is_visible_without_animation(name, tmp_path):
    """As in viewers or converters without SMIL: one text per counter, every worker in its color, no halo."""
    root = parsed(job(name, tmp_path))
    parents = {child: parent for parent in root.iter() for child in parent}
    for each in moving(root):
        attribute, values = each.attrib["attributeName"], each.attrib["values"].split(";")
        assert parents[each].get(attribute, "inline") == values[0]
    for group in root.iter(f"{SVG}g"):
        texts = [each.get("display") for each in group.findall(f"{SVG}text")]
        assert not texts or texts.count(None) == 1


def test_title_with_characters_invalid_in_xml_is_well_formed(tmp_path):
    reading = job("killed", tmp_path)
    text = film(reading.story, reading.rows, title="a\x00\x1b[1m\udcff\ufffe<b>")
    root = ElementTree.fromstring(text.encode())
    title = root.find(f"{SVG}title")
    assert root.tag == f"{SVG}svg" and title is not None
    assert title.text == "a\ufffd\ufffd[1m\ufffd\ufffd<b>"


def test_film_of_a_copy_that_begins_without_a_world_is_an_svg():
    story = JobHistory(TimeSpent(JobView()))
    rows = WorkerRows(story.view)
    story.view.adopt({}, 0, 1.0)
    assert ElementTree.fromstring(film(story, rows)).tag == f"{SVG}svg"
