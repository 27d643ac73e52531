"""``python -m elastic.driver.journal FILE``: print a journal, and check its replay."""

import sys

from elastic.driver.journal.journal import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
