"""``elasticrun explain``: explain a job from its journal, as text, as a page, or as JSON."""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from elastic.driver.commandline.offline.journal_argument import journal_of
from elastic.driver.commandline.options.argument_parser import (
    ArgumentParser,
    add_declared,
    flag,
    switch,
)
from elastic.driver.monitoring.explain.findings import FindingKind, findings
from elastic.driver.monitoring.explain.journal_file import JournalReading, read_journal
from elastic.driver.monitoring.explain.report_at_job_end import write_page
from elastic.driver.monitoring.explain.report_page import PageJob, page
from elastic.driver.monitoring.explain.sentences import HEADINGS, parts_meant, sections
from elastic.driver.monitoring.time_accounting import summary
from elastic.driver.processes.console import shown

DESCRIPTION = """\
Explain a job: which workers were lost and why, how the others recovered, the time lost, and what to change.
JOURNAL is the --journal file of a running, finished or killed job, or the name of a running job."""


# Legend for the section "What happened".
_NAMES = [
    "worker h:2#1: host h, slot 2 of that host, 1st process started in that slot",
    "generation: number of a world, which is a set of workers that train together",
    "commit g3c25: the 25th commit of generation 3",
]


@dataclass
class ExplainOptions:
    """Parsed flags of ``elasticrun explain``."""

    html: str | None = flag(
        "--html", "FILE", "Write the explanation as an HTML page with a zoomable timeline."
    )
    json: bool = switch("--json", "Print the findings as JSON, with their evidence and text.")


def parser() -> ArgumentParser:
    """Return the parser of ``elasticrun explain``."""
    made = ArgumentParser(
        prog="elasticrun explain",
        usage="elasticrun explain [flags] JOURNAL",
        description=DESCRIPTION,
    )
    add_declared(made.group("output"), ExplainOptions)
    made.group("general")("-h --help", None, None, "Show this help and exit.", action="help")
    return made


def main(arguments: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run ``elasticrun explain`` and return its exit code.

    Raises:
        Invalid: a flag is invalid, the journal cannot be read, or the page cannot be written.
    """
    options = ExplainOptions()
    wanted = "pass one journal, as in: elasticrun explain job.journal"
    journal = parser().with_one(arguments, options, wanted)
    reading = read_journal(journal_of(journal, environ))
    if reading.source.runs and reading.offset is not None:
        reading.story.go_on(time.time() - reading.offset)
    if options.html is not None:
        write_page(Path(options.html), as_page(reading))
    try:
        if options.json:
            print(as_json(reading))
        elif options.html is None:
            print(shown("\n".join(as_text(reading))))
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def as_text(reading: JournalReading) -> list[str]:
    """Return the explanation of a job as lines of text, with the most important findings first."""
    lines: list[str] = []
    for name, group in sections(findings(reading.story, reading.source)).items():
        if not group:
            continue
        if HEADINGS[name]:
            lines += ["", f"{HEADINGS[name]}{_dated(reading) if name == 'course' else ''}"]
        if name == "course":
            lines += [f"    {each}" for each in _NAMES]
        for finding, text in group:
            if finding.what is FindingKind.TIME:
                lines += [f"  {line}" for line in summary(reading.story.spent, zeros=False)]
                lines += [f"    {meant}" for meant in [parts_meant(finding.facts)] if meant]
                continue
            head, *more = text.splitlines() or [""]
            lines.append(f"{'  ' if HEADINGS[name] else ''}{head}")
            lines += [f"    {line}" for line in more]
    return lines


def as_page(reading: JournalReading) -> str:
    """Return the explanation of a job as an HTML page."""
    found = findings(reading.story, reading.source)
    command = shlex.join(reading.header.command)
    return page(PageJob(reading.story, reading.rows, found, command, reading.offset))


def _dated(reading: JournalReading) -> str:
    if reading.offset is None or reading.story.began is None:
        return " (times since the first event)"
    began = time.localtime(reading.offset + reading.story.began)
    return f" (times since {time.strftime('%Y-%m-%d %H:%M:%S %z', began)})"


def as_json(reading: JournalReading) -> str:
    """Return the explanation as JSON text: an object with the key ``findings``.

    Each finding has its kind, facts and sentence.
    """
    found = sections(findings(reading.story, reading.source))
    return json.dumps(
        {
            "began": None
            if reading.offset is None or reading.story.began is None
            else reading.offset + reading.story.began,
            "command": reading.header.command,
            "findings": [
                {"section": name, "what": finding.what.value, "facts": finding.facts, "text": text}
                for name, group in found.items()
                for finding, text in group
            ],
        },
        indent=1,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
