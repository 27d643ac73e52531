"""State of a job whose driver has exited, as restored from the journal."""

from __future__ import annotations

from dataclasses import dataclass

from elastic.driver.events import EndJob
from elastic.driver.journal.entries import Header, Writer
from elastic.driver.membership.membership import Membership
from elastic.driver.settings import Settings


@dataclass(frozen=True, kw_only=True)
class RecoveredJob:
    """State of a job at the end of its last driver, as restored from the journal."""

    header: Header
    settings: Settings  # settings, without the values of additional environment variables
    writer: Writer  # last driver that wrote the journal
    membership: Membership
    last_at: float  # time of the latest entry, on the last driver's clock
    ended: EndJob | None  # outcome of the job, if decided; workers may not have been notified yet
    replayed: int  # number of entries after the last snapshot

    @property
    def job(self) -> str:
        return self.header.job

    @property
    def command(self) -> list[str]:
        return self.header.command

    @property
    def folder(self) -> str:
        return self.header.folder

    @property
    def term(self) -> int:
        return self.writer.term

    @property
    def over(self) -> bool:
        """Return whether the job has ended and all its workers have exited."""
        return self.ended is not None and not self.membership.roster

    @property
    def address(self) -> str:
        """Return the address at which the last driver listened."""
        return self.writer.address
