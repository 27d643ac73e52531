"""``horovodrun``, at the path through which programs start it."""

from __future__ import annotations


def run_commandline() -> int:
    """Run a job with this process's command line, and return the exit code."""
    from elastic.driver.commandline.__main__ import main

    return main()


__all__ = ["run_commandline"]
