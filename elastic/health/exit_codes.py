"""Exit codes of the built-in health check. Pure."""

PASSED, FAILED, WRONG_RESULT = 0, 1, 3
