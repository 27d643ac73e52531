"""Forwarding of the workers' output to the driver, with and without one."""

from __future__ import annotations

from elastic.driver.agents import output_forwarding
from elastic.driver.agents.messages import Printed
from elastic.driver.agents.output_forwarding import ForwardingSink
from elastic.protocol.messages import Worker
from harness.golden import recorded

A, B = Worker("h", 0), Worker("h", 1)


class Driver:
    """Receives output, unless it is away or congested."""

    def __init__(self) -> None:
        self.here, self.backlog = True, 0
        self.heard: list[Printed] = []
        self.sink = ForwardingSink(self.hear, lambda: self.backlog)

    def hear(self, printed: Printed) -> bool:
        if self.here:
            self.heard.append(printed)
        return self.here

    def text(self, worker=A, stream="stdout") -> bytes:
        return b"".join(p.data for p in self.heard if (p.worker, p.stream) == (worker, stream))


def test_output_and_its_end_are_forwarded():
    driver = Driver()
    driver.sink.feed(A, "stdout", b"one")
    driver.sink.finish(A, "stdout")
    assert driver.heard == [Printed(A, "stdout", b"one"), Printed(A, "stdout", b"")]


def test_output_without_a_driver_is_forwarded_later_in_order():
    driver = Driver()
    driver.here = False
    driver.sink.feed(A, "stdout", b"one ")
    driver.sink.feed(B, "stderr", b"other")
    driver.here = True
    driver.sink.feed(A, "stdout", b"two")
    assert [p.data for p in driver.heard] == [b"one ", b"other", b"two"]


def test_output_beyond_the_buffer_is_dropped_and_counted(monkeypatch):
    monkeypatch.setattr(output_forwarding, "KEPT_LIMIT", 10)
    driver = Driver()
    driver.here = False
    driver.sink.feed(A, "stdout", b"123456789")
    for _ in range(3):
        driver.sink.feed(A, "stdout", b"ab")
    driver.sink.feed(B, "stdout", b"x")
    driver.sink.finish(A, "stdout")
    driver.here = True
    driver.sink.catch_up()
    driver.sink.feed(A, "stdout", b"on")
    recorded("messages", driver.text())
    assert driver.text(B) == b"x"
    assert Printed(A, "stdout", b"") in driver.heard


def test_congested_connection_receives_no_more(monkeypatch):
    driver = Driver()
    driver.backlog = output_forwarding.CONGESTED
    driver.sink.feed(A, "stdout", b"one")
    assert not driver.heard
    driver.backlog = 0
    driver.sink.catch_up()
    assert driver.text() == b"one"


def test_end_of_stderr_is_kept_for_the_exit():
    driver = Driver()
    driver.here = False
    driver.sink.feed(A, "stderr", b"Traceback: so it is\n")
    recorded("messages", driver.sink.tail(A))
    driver.sink.drop(A)
    assert driver.sink.tail(A) == ""


def test_usage_is_not_kept_for_an_absent_driver():
    driver = Driver()
    driver.here = False
    driver.sink.feed(A, "usage", b"{}")
    driver.here = True
    driver.sink.feed(A, "stdout", b"one")
    driver.sink.feed(A, "usage", b'{"memory":1}')
    assert [p.data for p in driver.heard] == [b"one", b'{"memory":1}']
