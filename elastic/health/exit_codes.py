"""Exit codes of the built-in health check. Pure: no I/O, no clock."""

PASSED, FAILED, WRONG_RESULT = 0, 1, 3
