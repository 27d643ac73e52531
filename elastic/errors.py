"""What can go wrong, in three kinds: an interruption, an error a user may see, a bug (an
``assert``).
"""

from __future__ import annotations


class Interrupted(BaseException):
    """Unwinds user code to ``elastic.run``. Not an error; do not catch it.

    A ``BaseException``, so that a user's ``except RuntimeError:`` around an out-of-memory
    handler cannot swallow a change of the world.
    """


class PeerLost(Interrupted):
    """A collective broke: restore the last commit, then rejoin."""


class WorldChanging(Interrupted):
    """A planned change: raised by ``commit()`` and ``check_host_updates()``, so nothing is lost."""


class LeaveRequested(Interrupted):
    """This worker was asked to leave and has stopped at an agreed check: end the process."""


class ElasticError(Exception):
    """Base of the errors that users may see."""


class NotInitialized(ElasticError, ValueError):
    """A query or collective was called before ``init()``."""


class TooFewWorkers(ElasticError):
    """Fewer workers than ``--min-np`` for longer than ``--elastic-timeout``."""


class StateMismatch(ElasticError):
    """This worker's model, optimizer or state differs from that of the running world."""


class RetriesExhausted(ElasticError):
    """``--reset-limit`` was reached, or every slot was given up."""


class JobFailed(ElasticError):
    """A launched job ended without success; the message names rank, host and exit code."""


class DriverLost(ElasticError):
    """The connection to the driver broke, and without it this worker can't go on."""


class CollectiveFailed(RuntimeError):
    """A collective of one group broke or was aborted. The runtime turns it into ``PeerLost``."""


class Invalid(ElasticError, ValueError):
    """Bad input: a flag, a file, an argument. The message says what to do."""
