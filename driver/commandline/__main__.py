"""Entry point of ``elasticrun`` and ``horovodrun``. Ctrl-C during imports ends the program without a traceback."""

from __future__ import annotations

import sys


def main() -> int:
    """Run ``elasticrun`` and return its exit code."""
    try:
        from elastic.driver.commandline import cli
    except KeyboardInterrupt:
        # 128 + SIGINT, as a literal: importing signal first would allow Ctrl-C to cause a traceback
        return 130
    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
