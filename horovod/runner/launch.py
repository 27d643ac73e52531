"""Entry point of ``horovodrun``, under the path that other programs use."""

from __future__ import annotations


def run_commandline() -> int:
    """Run a job with the command line of this process, and return its exit code."""
    from elastic.driver.commandline.__main__ import main

    return main()


__all__ = ["run_commandline"]
