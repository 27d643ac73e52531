"""Cost of many hosts that are lost together, as a function of the size of the job."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

from elastic.driver import events
from elastic.driver.job.job_decisions import JobDecisions
from elastic.driver.membership.membership import Membership, Phase
from elastic.driver.monitoring.job_view import JobView
from elastic.driver.settings import Settings
from elastic.protocol.messages import Address, Commit, Worker

SLOTS = 4


class Job:
    """A job whose workers train in generation 2, as its driver and its displays know it."""

    def __init__(self, hosts: int) -> None:
        size = SLOTS * hosts
        self.membership = Membership(
            Settings(elastic=True, np=size, workers_min=1, workers_max=size)
        )
        self.decisions = JobDecisions(self.membership, leave_s=5.0)
        self.view = JobView()
        self.now = 0.0
        workers = [Worker(f"h{host}", slot) for host in range(hosts) for slot in range(SLOTS)]
        self.note(events.HostsChanged({f"h{host}": SLOTS for host in range(hosts)}))
        for worker in workers:
            self.note(events.WorkerConnected(worker, 1))
        for generation, commit in enumerate((None, Commit(1, 0))):
            for worker in workers:
                store = Address("h", 1)
                ready = events.WorkerReady(
                    worker, generation, commit, store, running=generation > 0
                )
                self.note(ready)
        assert (self.membership.generation, self.membership.phase) == (2, Phase.TRAINING)

    def note(self, event: events.Event) -> None:
        self.now += 1e-3
        answer = self.decisions.answer(event, self.now)
        self.view.note(event, answer, self.now)
        self.decisions.follow(event, answer, self.now)


def steps_of(work: Callable[[], object]) -> int:
    """Return how many lines of Python ran, including each round of a comprehension."""
    steps = 0

    def count(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal steps
        steps += 1
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        work()
    finally:
        sys.settrace(before)
    return steps


def test_host_lost_when_another_was_just_lost_then_its_cost_does_not_depend_on_the_size_of_the_job():
    costs = []
    for hosts in (10, 80):
        job = Job(hosts)
        job.note(events.HostLost("h0", "silent"))  # ends the world, and notifies all workers
        assert job.membership.phase is Phase.GATHERING
        costs.append(steps_of(partial(job.note, events.HostLost("h1", "silent"))))
        assert not any(worker.host in ("h0", "h1") for worker in job.view.workers)
        assert len(job.decisions.running) == SLOTS * (hosts - 2)
    small, large = costs
    assert large <= 1.2 * small


def test_host_returned_when_other_hosts_are_full_then_only_its_slots_are_used_again():
    job = Job(10)
    job.note(events.HostLost("h3", "silent"))
    lost = [Worker("h3", slot) for slot in range(SLOTS)]
    job.note(events.HostReported("h3", [], lost))
    job.now += job.membership.settings.cooldown_min_s
    actions = job.decisions.answer(events.TimePassed(), job.now)
    started = [each.worker for each in actions if isinstance(each, events.StartWorker)]
    assert started == [worker.next() for worker in lost]
