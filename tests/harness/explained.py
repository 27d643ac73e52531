"""A conversation with the membership, and the findings of ``explain`` about it."""

from __future__ import annotations

from typing import Any

from elastic.driver.events import Action, Event
from elastic.driver.monitoring.explain.findings import FindingKind, JournalState, findings
from elastic.driver.monitoring.explain.job_history import JobHistory
from elastic.driver.monitoring.explain.sentences import sentence
from elastic.driver.monitoring.job_view import JobView
from elastic.driver.monitoring.time_accounting import TimeSpent
from harness.conversation import MembershipConversation, hosts
from harness.golden import recorded


class ExplainedConversation(MembershipConversation):
    """Members that train in generation 2. The readers of the job's events follow ``spent``."""

    def __init__(self, workers: int, *, slots: int | None = None, **settings: Any) -> None:
        super().__init__(np=workers, **settings)
        self.spent = TimeSpent(JobView())
        self.story = JobHistory(self.spent)
        self.follow()
        names = [f"h:{slot}" for slot in range(workers)]
        self.tell(hosts(h=slots or workers))
        self.connect(*names)
        for running in (False, True):
            self.ready(*names, running=running)
        self.resume()

    def follow(self) -> None:
        """Create other readers, before the first event."""

    def _handle(self, event: Event) -> list[Action]:
        actions = self.m.handle(event, self.now)
        self.m.check()
        self.spent.view.note(event, actions, self.now)
        return actions

    def found(self, kind: FindingKind) -> list[dict[str, Any]]:
        """Return the facts of the findings of this kind, and record their sentences."""
        self.story.go_on(self.now)
        every = findings(self.story, JournalState(self.m.worlds.settings, runs=True))
        kept = [each for each in every if each.what is kind]
        for each in kept:
            recorded("messages", sentence(each))
        return [each.facts for each in kept]
