"""Entry point of ``elasticrun`` and ``horovodrun``. Ctrl-C during its imports ends it without a traceback."""

from __future__ import annotations

import sys


def main() -> int:
    """Run the program and return its exit code."""
    try:
        from elastic.driver.commandline import cli
    except KeyboardInterrupt:
        return 130  # 128 + SIGINT; importing its name takes a part of the time in which Ctrl-C is not handled
    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
