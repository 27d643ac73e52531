"""``horovodrun``, under the path that programs start it by."""

from __future__ import annotations


def run_commandline() -> int:
    """Runs a job by this process's command line, and returns the exit code."""
    from elastic.driver.commandline.cli import main

    return main()


__all__ = ["run_commandline"]
