"""Argument of the commands that read a journal: a file, or the name of a running job."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from elastic.driver.job.operator_api.runtime_folder import records
from elastic.errors import Invalid


def journal_of(job: str, environ: Mapping[str, str]) -> Path:
    """Return the path of a journal, given a path or the name of a running job.

    Raises:
        Invalid: the job has no journal, or the folder of running jobs is not accessible.
    """
    if os.path.exists(job):
        return Path(job)
    for record in records(environ):
        if record.name == job and record.journal:
            return Path(record.journal)
        if record.name == job:
            raise Invalid(
                f"job {job} has no journal: start it with --journal FILE, or see elasticrun status {job}"
            )
    return Path(job)
