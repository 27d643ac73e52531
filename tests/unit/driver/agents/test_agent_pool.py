"""Agent pool: agents of hosts, pending orders, lost hosts, and starts of agents. As conversations."""

from __future__ import annotations

from typing import Any

import pytest

from elastic.driver.agents.agent_pool import (
    ARRIVE_S,
    CALL_S,
    NO_AGENT,
    RETURN_S,
    STOPPED_S,
    TOGETHER_S,
    AgentPool,
)
from elastic.driver.agents.messages import (
    AgentId,
    Attach,
    BandwidthFound,
    BandwidthServed,
    Beat,
    CallForBandwidth,
    Detach,
    Heard,
    HeardTogether,
    Here,
    Kill,
    Registered,
    Reject,
    Seen,
    ServeBandwidth,
    Start,
)
from elastic.driver.agents.pool_events import (
    AgentConnected,
    AgentDisconnected,
    AgentMessageReceived,
    AgentNotStarted,
    AgentStarted,
    BandwidthOrdered,
    DisconnectAgent,
    DriverReady,
    GiveUpOrdered,
    JobEnded,
    KillOrdered,
    ListConnectedHosts,
    PostToDriver,
    RelayMessage,
    SendToAgents,
    StartAgent,
    StartOrdered,
)
from elastic.driver.agents.pool_state import AGAIN_S, DeadlineKind, PoolDeadlines
from elastic.driver.events import (
    BandwidthMeasured,
    HostLost,
    HostReported,
    HostsChanged,
    Report,
    TimePassed,
    WorkerExited,
    WorkersReady,
    WorkersResumed,
)
from elastic.protocol import messages as protocol
from elastic.protocol.messages import Address, Worker
from harness.golden import recorded

ATTACH = Attach("one", 1, 2.0, 60.0)
A, A2, B = Worker("here", 0), Worker("here", 1), Worker("there", 0)
FIRST = AgentId("here", 5)
THERE = AgentId("there", 1)


def order(worker: Worker) -> Start:
    return Start(worker, ["train"], {}, "/")


def registered(*running: Worker, exits=(), ends=False) -> Registered:
    addresses = ["127.0.0.1/8"]
    return Registered(2, "127.0.0.1", addresses, [*running], [*exits], "one", ends=ends)


def sent_to(agent: AgentId, *messages: Any) -> SendToAgents:
    return SendToAgents([agent], [*messages])


class Talk:
    """A pool and the time. Log lines are kept separately."""

    def __init__(self, **given: Any) -> None:
        self.pool = AgentPool(ATTACH, **given)
        self.now = 100.0
        self.log: list[str] = []

    def hear(self, *events: Any, at: float | None = None) -> list[Any]:
        self.now = self.now if at is None else at
        actions = [action for event in events for action in self.pool.handle(event, self.now)]
        self.log += [each.text for each in actions if isinstance(each, Report)]
        return [each for each in actions if not isinstance(each, Report)]

    def here(self, agent: AgentId, *running: Worker, exits=(), ends=False) -> list[Any]:
        """Connect an agent, attach it, and report its running workers."""
        assert self.hear(AgentConnected(agent)) == [sent_to(agent, ATTACH)]
        return self.hear(AgentMessageReceived(agent, registered(*running, exits=exits, ends=ends)))

    def deadline(self) -> list[Any]:
        """Return the actions at the next deadline."""
        at = self.pool.next_deadline()
        assert at is not None and at > self.now
        return self.hear(TimePassed(), at=at)


def test_orders_wait_for_the_agent():
    talk = Talk()
    assert talk.hear(StartOrdered(order(A)), StartOrdered(order(A2))) == []
    assert talk.here(FIRST) == [
        PostToDriver(HostReported("here", [], [])),  # not ordered on any connection before
        sent_to(FIRST, order(A)),
        sent_to(FIRST, order(A2)),
    ]
    assert talk.hear(KillOrdered(A)) == [sent_to(FIRST, Kill(A))]
    assert talk.hear(AgentMessageReceived(FIRST, Heard(A, protocol.Returned(1)))) == [
        RelayMessage(A, protocol.Returned(1))
    ]
    gone = Seen(WorkerExited(A, -9))
    assert talk.hear(AgentMessageReceived(FIRST, gone), AgentMessageReceived(FIRST, gone)) == [
        PostToDriver(WorkerExited(A, -9))
    ]
    assert talk.pool.alive() == {A2}


def test_pending_order_is_withdrawn():
    talk = Talk()
    talk.hear(StartOrdered(order(A)), StartOrdered(order(A2)))
    assert talk.hear(KillOrdered(A)) == [PostToDriver(WorkerExited(A, -9))]
    assert talk.here(FIRST)[1:] == [sent_to(FIRST, order(A2))]


def test_kill_is_repeated_when_the_agent_returns():
    talk = Talk(adopted=[A, A2])
    talk.hear(DriverReady(), KillOrdered(A), KillOrdered(A2))
    assert talk.here(FIRST, A, exits=[WorkerExited(A2, 0)]) == [
        PostToDriver(WorkerExited(A2, 0)),
        PostToDriver(HostReported("here", [A], [A])),
        sent_to(FIRST, Kill(A)),
    ]
    talk.hear(AgentDisconnected(FIRST, False))
    assert talk.here(FIRST, A) == [PostToDriver(HostReported("here", [A], [A]))]


def test_workers_pending_for_a_missing_agent_end():
    talk = Talk()
    talk.hear(StartOrdered(order(A)))
    assert talk.pool.next_deadline() == 100.0 + CALL_S
    [ended] = talk.deadline()
    assert (ended.event.worker, ended.event.code) == (A, NO_AGENT)
    recorded("messages", ended.event.reason)
    assert talk.pool.alive() == set() and talk.pool.next_deadline() is None


def test_returning_agent_reports_the_fate_of_its_workers():
    talk = Talk()
    talk.hear(StartOrdered(order(A)), StartOrdered(order(A2)))
    talk.here(FIRST)
    assert talk.hear(AgentDisconnected(FIRST, False)) == []
    assert talk.pool.agent_of("here") is None
    exits = [WorkerExited(A2, 0), WorkerExited(Worker("here", 7), 3)]
    assert talk.here(FIRST, A, exits=exits) == [
        PostToDriver(WorkerExited(A2, 0)),  # and no report of a worker that it never had
        PostToDriver(HostReported("here", [A], [A])),
    ]
    assert talk.pool.next_deadline() is None


def test_agent_that_does_not_return_is_a_lost_host_and_its_successor_reports_pending_orders():
    talk = Talk()
    talk.here(FIRST)
    talk.hear(StartOrdered(order(A)), AgentDisconnected(FIRST, False))
    assert talk.pool.next_deadline() == 100.0 + RETURN_S
    [lost] = talk.deadline()
    assert lost.event == HostLost("here", "its agent has not reconnected within 0.5 s")
    assert talk.pool.alive() == {A}, "nobody knows that it is dead"
    second = AgentId("here", 6)
    assert talk.here(second) == [PostToDriver(HostReported("here", [], [A]))]
    recorded("log", talk.log[-1])
    assert talk.pool.alive() == set()


def test_host_that_acknowledges_no_message_is_lost_at_once():
    talk = Talk()
    talk.here(FIRST, A)
    talk.hear(AgentDisconnected(FIRST, True))
    assert talk.pool.next_deadline() == 100.0 + TOGETHER_S
    assert isinstance(talk.deadline()[0].event, HostLost)


def test_host_has_one_agent_at_a_time():
    talk = Talk()
    talk.here(FIRST)
    earlier, later = AgentId("here", 4), AgentId("here", 6)
    refused = sent_to(earlier, Reject("another agent already serves this host"))
    assert talk.hear(AgentConnected(earlier)) == [refused]
    assert talk.hear(AgentConnected(later)) == [DisconnectAgent(later)], "it has to wait"
    assert talk.hear(AgentMessageReceived(later, registered())) == [], "it was not attached"
    talk.hear(AgentDisconnected(FIRST, False))
    assert talk.here(later) == [PostToDriver(HostReported("here", [], []))]
    assert talk.hear(AgentMessageReceived(FIRST, Seen(WorkerExited(A, 0)))) == [], (
        "of one that was followed"
    )
    assert talk.hear(AgentDisconnected(FIRST, False)) == [] and talk.pool.agent_of("here") == later


def test_host_whose_clock_went_back_is_accepted_again():
    talk = Talk()
    talk.here(FIRST)
    talk.hear(AgentDisconnected(FIRST, False))
    earlier = AgentId("here", 4)
    assert talk.here(earlier) == [PostToDriver(HostReported("here", [], []))]


def test_merged_reports_are_one_event_of_the_driver():
    talk = Talk()
    talk.here(FIRST, A, A2)
    for event in (
        WorkersReady([A, A2], [1, 2], 1, None, "10.0.0.1"),
        WorkersResumed([A, A2], 2, {"told": [1.0, 2.0]}),
    ):
        assert talk.hear(AgentMessageReceived(FIRST, HeardTogether(event))) == [PostToDriver(event)]


def test_agent_reports_only_its_own_workers():
    talk = Talk()
    talk.here(FIRST)
    for lie in (
        Heard(B, protocol.Returned(1)),
        Seen(WorkerExited(B, 0)),
        registered(B),
        HeardTogether(WorkersReady([A, B], [1, 2], 1, None, "10.0.0.1")),
        HeardTogether(WorkersReady([A, A2], [1], 1, None, "10.0.0.1")),
        HeardTogether(WorkersResumed([A, A2], 2, {"told": [1.0, 2.0], "group": [1.0]})),
        HeardTogether(WorkersResumed([A, A2], 2, {}, [1])),
        HeardTogether(WorkersReady([A, A], [1, 2], 1, None, "10.0.0.1")),
        HeardTogether(WorkersResumed([A, A2, A], 2, {"told": [1.0, 2.0, 3.0]})),
        HeardTogether(WorkersReady([], [], 1, None, "10.0.0.1")),
        HeardTogether(WorkersResumed([], 2, {})),
    ):
        assert talk.hear(AgentMessageReceived(FIRST, lie)) == [DisconnectAgent(FIRST)]
    assert len(talk.log) == 11


def test_connected_agent_that_sends_nothing_is_lost():
    talk = Talk()
    talk.hear(DriverReady())
    talk.here(FIRST, A)
    talk.here(THERE, B)
    heard = []
    while DisconnectAgent(FIRST) not in heard:
        heard = talk.deadline()
        talk.hear(AgentMessageReceived(THERE, Here()))
        assert SendToAgents([FIRST, THERE], [Beat()]) in heard
        assert talk.now <= 100.0 + STOPPED_S + 2.0
    assert talk.now >= 100.0 + STOPPED_S
    assert DisconnectAgent(THERE) not in heard
    recorded("log", talk.log[-1])


def test_agent_given_up_by_the_driver_is_lost_at_once_and_may_return():
    talk = Talk()
    talk.hear(DriverReady())
    talk.here(FIRST, A)
    talk.here(THERE, B)
    given_up = GiveUpOrdered("here", "it does not answer")
    lost = PostToDriver(HostLost("here", "it does not answer"))
    assert talk.hear(given_up) == [DisconnectAgent(FIRST), lost]
    recorded("log", talk.log[-1])
    assert talk.hear(given_up, AgentDisconnected(FIRST, False)) == []
    later = talk.now + RETURN_S + 1
    while talk.now < later:
        assert not [each for each in talk.deadline() if isinstance(each, PostToDriver)], "lost once"
    assert talk.here(FIRST, A) == [PostToDriver(HostReported("here", [A], [A]))]
    talk.hear(AgentDisconnected(FIRST, False))
    reports: list[Any] = []
    while not reports:
        reports = [each for each in talk.deadline() if isinstance(each, PostToDriver)]
    assert reports[0].event.host == "here"


def test_driver_is_cut_off_and_no_host_is_lost_when_all_are_unreachable():
    talk = Talk()
    talk.here(FIRST, A)
    talk.here(THERE, B)
    talk.hear(AgentDisconnected(FIRST, True), AgentDisconnected(THERE, True))
    assert talk.deadline() == []
    recorded("log", talk.log[-1])
    talk.now += 30.0
    assert talk.here(THERE, B) == [PostToDriver(HostReported("there", [B], [B]))]
    recorded("log", talk.log[-1])
    [lost] = talk.deadline()
    assert lost.event.host == "here", "its time has begun anew"
    assert talk.now == pytest.approx(100.0 + TOGETHER_S + 30.0 + ATTACH.lease_s + RETURN_S)


def test_driver_that_remains_cut_off_loses_all_hosts():
    talk = Talk()
    talk.here(FIRST, A)
    talk.here(THERE, B)
    talk.hear(AgentDisconnected(FIRST, True), AgentDisconnected(THERE, True))
    talk.deadline()
    lost = talk.deadline()
    assert talk.now == 100.0 + TOGETHER_S + ATTACH.away_s
    assert [each.event.host for each in lost] == ["here", "there"]


def test_workers_of_the_previous_driver_are_found_again_or_given_up():
    talk = Talk(adopted=[A, B])
    assert talk.pool.alive() == {A, B}
    assert talk.hear(DriverReady()) == []
    assert talk.here(FIRST, A) == [PostToDriver(HostReported("here", [A], [A]))]
    lost: list[Any] = []
    while not lost:
        lost = [each for each in talk.deadline() if isinstance(each, PostToDriver)]
    assert lost[0].event == HostLost("there", "its agent has not reconnected to the new driver")
    assert talk.now == 100.0 + CALL_S


def test_every_agent_is_dismissed_and_awaited_at_the_end():
    talk = Talk()
    talk.here(FIRST, A)
    talk.here(THERE)
    goodbye = Detach("the job has ended")
    assert talk.hear(JobEnded()) == [sent_to(FIRST, goodbye), sent_to(THERE, goodbye)]
    assert talk.pool.awaits_agents()
    talk.hear(AgentMessageReceived(FIRST, Seen(WorkerExited(A, -9))))
    assert not talk.pool.awaits_agents()
    assert talk.hear(AgentDisconnected(THERE, False)) == [] and talk.pool.next_deadline() is None
    assert talk.here(AgentId("late", 1)) == [sent_to(AgentId("late", 1), goodbye)]


def test_agent_bound_to_the_job_is_awaited_until_disconnected():
    """Its last messages may be in flight when the driver disconnects, and then it would never read its dismissal."""
    talk = Talk()
    talk.here(FIRST, A, ends=True)
    talk.hear(JobEnded(), AgentMessageReceived(FIRST, Seen(WorkerExited(A, -9))))
    assert talk.pool.awaits_agents()
    talk.hear(AgentDisconnected(FIRST, False))
    assert not talk.pool.awaits_agents()


def ended_as_it_started(*, outlives: bool) -> Talk:
    """Start an agent, and end the job before the agent connects."""
    talk = Talk(starts_agents=True)
    started = AgentStarted("here", outlives=outlives)
    talk.hear(StartOrdered(order(A)), started, KillOrdered(A), JobEnded())
    return talk


def test_started_agent_that_outlives_its_starter_is_awaited_to_be_dismissed():
    talk = ended_as_it_started(outlives=True)
    assert talk.pool.awaits_agents()
    assert talk.here(FIRST, ends=True) == [sent_to(FIRST, Detach("the job has ended"))]
    talk.hear(AgentDisconnected(FIRST, False))
    assert not talk.pool.awaits_agents()


def test_agent_that_does_not_connect_is_awaited_briefly_when_detached_from_the_driver():
    talk = ended_as_it_started(outlives=True)
    assert talk.deadline() == [] and talk.now == 100.0 + CALL_S
    assert not talk.pool.awaits_agents() and talk.pool.next_deadline() is None
    assert not ended_as_it_started(outlives=False).pool.awaits_agents()


# ---- agents started by the driver ----------------------------------------------------------------------------------


def test_one_agent_is_started_for_all_workers_of_a_host():
    talk = Talk(starts_agents=True)
    starts = talk.hear(StartOrdered(order(A)), StartOrdered(order(A2)))
    assert starts == [StartAgent("here")]
    assert talk.pool.next_deadline() is None, "the start may take as long as it likes"
    talk.now += 300.0
    talk.hear(AgentStarted("here"))
    assert talk.pool.next_deadline() == talk.now + ARRIVE_S
    ended = talk.deadline()
    assert [each.event.code for each in ended] == [NO_AGENT, NO_AGENT]
    recorded("messages", ended[0].event.reason)


def test_workers_whose_agent_cannot_be_started_end_with_the_reason():
    talk = Talk(starts_agents=True)
    talk.hear(StartOrdered(order(A)))
    [ended] = talk.hear(AgentNotStarted("here", "no way to it"))
    recorded("messages", ended.event.reason)
    assert not talk.pool.alive()


def test_agent_of_a_lost_host_is_retried_with_increasing_pauses():
    talk = Talk(starts_agents=True)
    talk.hear(HostsChanged({"here": 2}))
    talk.here(FIRST, A)
    talk.hear(AgentDisconnected(FIRST, True))
    talk.deadline()
    waited = []
    for _ in range(8):
        before = talk.now
        assert talk.deadline() == [StartAgent("here")]
        waited.append(talk.now - before)
        assert talk.hear(AgentNotStarted("here", "no way")) == []
    assert waited[:3] == [AGAIN_S[0], 2 * AGAIN_S[0], 4 * AGAIN_S[0]]
    assert waited[-1] == AGAIN_S[1]
    recorded("log", talk.log)
    talk.here(AgentId("here", 6))
    assert talk.pool.next_deadline() is None


def test_no_agent_is_retried_while_its_host_is_unlisted():
    talk = Talk(starts_agents=True)
    talk.here(FIRST, A)
    talk.hear(AgentDisconnected(FIRST, True))
    talk.deadline()
    assert talk.deadline() == []
    talk.hear(HostsChanged({"here": 1}))
    assert talk.deadline() == [StartAgent("here")]


def test_agent_is_dismissed_from_an_unlisted_host():
    """Its machine will be removed and may wait for it, unless a worker there is still about to exit."""
    talk = Talk(starts_agents=True)
    talk.hear(HostsChanged({"here": 2, "there": 1}))
    talk.here(FIRST, A)
    assert talk.hear(HostsChanged({"there": 1})) == []
    ended, dismissed = talk.hear(AgentMessageReceived(FIRST, Seen(WorkerExited(A, 0))))
    assert ended == PostToDriver(WorkerExited(A, 0))
    assert isinstance(dismissed.messages[0], Detach)
    assert talk.pool.agent_of("here") is None
    talk.hear(HostsChanged({"here": 2, "there": 1}))
    assert talk.hear(StartOrdered(order(A2))) == [StartAgent("here")]


def test_self_connecting_agents_stay_on_unlisted_hosts():
    talk = Talk()
    talk.hear(HostsChanged({"here": 1}))
    talk.here(FIRST)
    assert talk.hear(HostsChanged({})) == [] and talk.pool.agent_of("here") == FIRST


# ---- deadlines -----------------------------------------------------------------------------------------------------


def test_earliest_deadline_is_popped_first_and_once():
    table = PoolDeadlines()
    assert table.first() is None and table.pop(1e9) is None
    table.put("b", DeadlineKind.ARRIVAL, 5.0)
    table.put("a", DeadlineKind.ARRIVAL, 5.0)
    table.put("a", DeadlineKind.RETRY, 3.0)
    assert table.first() == 3.0 and table.pop(2.9) is None
    assert table.pop(9.0) == ("a", DeadlineKind.RETRY)
    table.put("b", DeadlineKind.ARRIVAL, 7.0)
    assert table.pop(9.0) == ("a", DeadlineKind.ARRIVAL)
    table.drop("b", DeadlineKind.ARRIVAL)
    assert table.first() is None and ("b", DeadlineKind.ARRIVAL) not in table


def test_postponed_deadline_expires_once_at_its_new_time():
    table = PoolDeadlines()
    table.put("a", DeadlineKind.ARRIVAL, 1.0)
    table.put("a", DeadlineKind.ARRIVAL, 4.0)
    assert table.first() == 4.0 and table.pop(3.0) is None
    assert table.pop(4.0) == ("a", DeadlineKind.ARRIVAL)
    table.put("a", DeadlineKind.ARRIVAL, 6.0)
    table.drop("a", DeadlineKind.ARRIVAL)
    table.put("a", DeadlineKind.ARRIVAL, 6.0)
    assert table.pop(6.0) == ("a", DeadlineKind.ARRIVAL)
    assert table.pop(6.0) is None and table.first() is None


def comparisons_until_all_reconnect(hosts: int) -> int:
    compared = 0

    class Deadline(float):
        def __lt__(self, other: float) -> bool:
            nonlocal compared
            compared += 1
            return super().__lt__(other)

    table = PoolDeadlines()
    for host in range(hosts):
        table.put(f"h{host}", DeadlineKind.ARRIVAL, Deadline(host + 3))
    for host in range(hosts):
        table.drop(f"h{host}", DeadlineKind.ARRIVAL)
        assert (table.first() is None) is (host == hosts - 1)
    return compared


def test_reconnection_of_all_hosts_needs_few_comparisons_per_deadline():
    assert comparisons_until_all_reconnect(256) <= 256 * 16


# ---- engines whose tasks hold agents ---------------------------------------------------------------------------------


def lists(actions: list[Any]) -> list[dict[str, int]]:
    return [action.hosts for action in actions if isinstance(action, ListConnectedHosts)]


def of_engine() -> tuple[AgentPool, AgentId, AgentId]:
    """Return a pool with two agents that have connected by themselves."""
    pool = AgentPool(Attach("job", 1, 2.0, 30.0), lists_hosts=True)
    pool.handle(DriverReady(), 0.0)
    agents = AgentId("h1", 1), AgentId("h2", 1)
    for agent in agents:
        pool.handle(AgentConnected(agent), 1.0)
    one = Registered(1, "10.0.0.1", [], [], [], "job", ends=True)
    assert lists(pool.handle(AgentMessageReceived(agents[0], one), 1.0)) == [{"h1": 1}]
    both = lists(pool.handle(AgentMessageReceived(agents[1], one), 1.0))
    assert both == [{"h1": 1, "h2": 1}]
    return pool, *agents


def test_hosts_of_an_engine_are_the_hosts_with_agents():
    pool, first, _ = of_engine()
    again = Registered(1, "10.0.0.1", [], [], [], "job", ends=True)
    assert lists(pool.handle(AgentDisconnected(first, False), 2.0)) == []
    pool.handle(AgentConnected(first), 2.1)
    assert lists(pool.handle(AgentMessageReceived(first, again), 2.1)) == []
    assert lists(pool.handle(AgentDisconnected(first, False), 3.0)) == []
    assert lists(pool.handle(TimePassed(), 3.0 + RETURN_S)) == [{"h2": 1}]


def test_agent_of_an_engine_is_dismissed_once_its_host_has_left_the_list():
    pool, first, _ = of_engine()
    assert pool.handle(HostsChanged({"h1": 1}), 2.0) == [], "the other is not on the list yet"
    pool.handle(HostsChanged({"h1": 1, "h2": 1}), 2.1)
    actions = pool.handle(HostsChanged({"h2": 1}), 3.0)
    told = [each for each in actions if isinstance(each, SendToAgents)]
    assert [each.agents for each in told] == [[first]]
    assert isinstance(told[0].messages[0], Detach)
    assert lists(actions) == [{"h2": 1}]


def test_self_connecting_agents_do_not_change_the_host_list():
    pool = AgentPool(Attach("job", 1, 2.0, 30.0))
    agent = AgentId("h1", 1)
    pool.handle(AgentConnected(agent), 1.0)
    registered = Registered(1, "10.0.0.1", [], [], [], "job")
    assert lists(pool.handle(AgentMessageReceived(agent, registered), 1.0)) == []


# ---- bandwidth -------------------------------------------------------------------------------------------------------


def measuring() -> Talk:
    """Two hosts with agents, after the order to measure the bandwidth of host a to host b."""
    talk = Talk()
    talk.here(FIRST)
    talk.here(THERE)
    ordered = talk.hear(BandwidthOrdered(FIRST.host, THERE.host))
    assert ordered == [sent_to(THERE, ServeBandwidth(FIRST.host))]
    return talk


def test_measured_host_calls_the_address_on_which_its_peer_listens():
    talk, address = measuring(), Address("10.0.0.2", 7)
    served = AgentMessageReceived(THERE, BandwidthServed(FIRST.host, address))
    assert talk.hear(served) == [sent_to(FIRST, CallForBandwidth(THERE.host, address))]
    event = BandwidthMeasured(FIRST.host, THERE.host, 1e6, 2e6)
    assert talk.hear(AgentMessageReceived(FIRST, BandwidthFound(event))) == [PostToDriver(event)]


def test_measurement_to_a_host_that_cannot_listen_fails():
    served = AgentMessageReceived(THERE, BandwidthServed(FIRST.host, None, "no port"))
    failed = BandwidthMeasured(FIRST.host, THERE.host, trouble="no port")
    assert measuring().hear(served) == [PostToDriver(failed)]


@pytest.mark.parametrize("present", [FIRST, THERE])
def test_measurement_without_both_agents_fails_at_once(present):
    talk = Talk()
    talk.here(present)
    [failed] = talk.hear(BandwidthOrdered(FIRST.host, THERE.host))
    assert isinstance(failed.event, BandwidthMeasured) and failed.event.trouble
    assert failed.event.sent is failed.event.received is None


def test_agent_cannot_report_the_bandwidth_of_another_host():
    talk = measuring()
    found = BandwidthFound(BandwidthMeasured(FIRST.host, THERE.host, 1.0, 1.0))
    actions = talk.hear(AgentMessageReceived(THERE, found))
    assert not [each for each in actions if isinstance(each, PostToDriver)]
