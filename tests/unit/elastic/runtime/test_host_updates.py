"""Notifications of host changes: states under elastic.run, and listeners registered as in Horovod."""

from __future__ import annotations

import pytest

from elastic.errors import Invalid
from elastic.protocol import messages
from elastic.rendezvous import worker_settings
from elastic.runtime import host_updates
from elastic.runtime.recovery import Phase, Recovery
from elastic.runtime.worker_runtime import WorkerRuntime
from elastic.state import ObjectState
from harness.golden import raises
from horovod.common import elastic as without_framework
from horovod.runner.elastic import worker
from horovod.runner.elastic.worker import HostUpdateResult, WorkerNotificationManager


class Listener:
    def __init__(self) -> None:
        self.heard: list[tuple[float, int]] = []

    def on_hosts_updated(self, timestamp: float, update_result: int) -> None:
        self.heard.append((timestamp, update_result))


class Broken:
    def on_hosts_updated(self, timestamp: float, update_result: int) -> None:
        raise KeyError("a listener's own trouble")


@pytest.fixture
def listener():
    made = Listener()
    host_updates.register(made)
    yield made
    host_updates.remove(made)


def test_the_results_are_flags_with_horovods_numbers():
    found = [HostUpdateResult.no_update, HostUpdateResult.removed, HostUpdateResult.added]
    assert [int(each) for each in found] == [0, 1, 2]
    assert HostUpdateResult.removed | HostUpdateResult.added == HostUpdateResult.mixed


def test_a_manager_registers_notifies_and_removes_listeners():
    manager, listener = WorkerNotificationManager(), Listener()
    manager.init(None, None, "eth0", hostname="h", local_rank=0)
    manager.register_listener(listener)
    manager.register_listener(listener)
    WorkerNotificationManager().handle_hosts_updated(5.0, HostUpdateResult.added)
    assert listener.heard == [(5.0, HostUpdateResult.added)]
    manager.remove_listener(listener)
    manager.remove_listener(listener)
    manager.handle_hosts_updated(6.0, HostUpdateResult.removed)
    assert len(listener.heard) == 1


def test_listener_that_raises_does_not_prevent_later_listeners(listener, capsys):
    first = Broken()
    host_updates.remove(listener)
    with host_updates.registered(first), host_updates.registered(listener):
        host_updates.notify(1.0, HostUpdateResult.mixed)
    assert listener.heard == [(1.0, 3)]
    assert "Broken.on_hosts_updated raised" in capsys.readouterr().err


def test_a_registered_listener_stays_registered_in_the_next_world(listener):
    with host_updates.registered(listener):
        pass
    host_updates.notify(2.0, HostUpdateResult.mixed)
    assert listener.heard == [(2.0, 3)]


def test_repeated_notification_of_a_planned_change_is_reported_once(listener):
    sent: list[messages.Message] = []
    rt = WorkerRuntime(worker_settings.read({}), None)
    rt.session.recovery = Recovery(phase=Phase.TRAINING, generation=2, provisional=False)
    rt.session.send = sent.append  # type: ignore[method-assign, assignment]
    for message in (
        messages.Prepare(1, 1),  # of a world that is over
        messages.Prepare(2, 1),
        messages.Prepare(2, 1),
        messages.StopAt(2, 1, 1),
    ):
        rt.link_thread.receive(message)
    assert [result for _, result in listener.heard] == [HostUpdateResult.mixed]
    assert messages.Checked(2, 1, 0) in sent
    rt.link_thread.receive(messages.Prepare(2, 2))
    assert len(listener.heard) == 2


def test_another_list_of_hosts_is_reported_immediately_and_does_not_stop_training(listener):
    rt = WorkerRuntime(worker_settings.read({}), None)
    rt.session.recovery = Recovery(phase=Phase.TRAINING, generation=2, provisional=False)
    rt.link_thread.receive(messages.HostsListed())
    assert [result for _, result in listener.heard] == [HostUpdateResult.mixed]
    rt.commits.check()
    assert rt.session.recovery.phase is Phase.TRAINING


def test_a_notified_state_keeps_the_timestamp():
    state = ObjectState(step=0)
    with host_updates.registered(state):
        host_updates.notify(7.0, HostUpdateResult.mixed)
        host_updates.notify(6.0, HostUpdateResult.mixed)
    state.check_host_updates()
    assert state._last_updated_timestamp == 7.0
    assert state._host_messages.empty()


def test_names_without_a_service_raise_attribute_error():
    with raises(AttributeError):
        _ = worker.WorkerNotificationService
    with raises(AttributeError):
        _ = worker.Nothing


def test_horovods_loop_without_a_framework_is_the_run_loop():
    assert isinstance(without_framework.notification_manager, WorkerNotificationManager)
    assert callable(without_framework.run_fn(lambda state: None, lambda: None))
    with raises(Invalid):
        without_framework.run_fn(lambda state: None, 3)  # type: ignore[arg-type]
