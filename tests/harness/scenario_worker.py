"""One worker's Recovery in a scenario: messages of the driver, user code, and its reactions."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from elastic.protocol import messages
from elastic.protocol.messages import Address, Commit, Place
from elastic.runtime.recovery import AbortGroups, Action, Recovery, Send, Verdict

STORE = Address("127.0.0.1", 7000)
DOES = {
    Verdict.PASS: "go on",
    Verdict.HOLD: "hold here for the driver's word",
    Verdict.STOP: "stop here: raise WorldChanging",
    Verdict.BROKEN: "raise PeerLost",
    Verdict.OVER: "end",
}


class WorkerStory:
    """Rank 1, which has just started."""

    def __init__(self) -> None:
        self.machine = Recovery()

    def happens(self, line: str) -> Iterator[str]:
        before = self.machine.phase
        yield from self._answers(line)
        if self.machine.phase is not before:
            yield f"(it is {self.machine.phase.value} now)"

    def _answers(self, line: str) -> Iterator[str]:
        for pattern, message in HEARS.items():
            found = re.fullmatch(f"the driver says: {pattern}", line)
            if found:
                yield from map(line_of, self.machine.receive(message(found)))
                return
        for pattern, do in DOES_ITSELF.items():
            found = re.fullmatch(pattern, line)
            if found:
                yield from do(self.machine, found)
                return
        raise ValueError(f"{line!r} is nothing that can happen; see {__file__} for what can")


def line_of(action: Action) -> str:
    match action:
        case AbortGroups(generation, reason):
            return f"cut the collectives of generation {generation}: {reason}"
        case Send(messages.Ready(generation, commit, _, _, running)):
            held = f"commit {commit}" if commit else "no commit"
            where = "" if running else ", outside elastic.run"
            return f"say ready: last in generation {generation}, holds {held}{where}"
        case Send(messages.Checked(generation, change, check)):
            return f"answer change {change} of generation {generation}: {check} checks passed"
        case Send(messages.Failed(generation, reason)):
            return f"say that generation {generation} broke here: {reason}"
        case Send(messages.Stranded(generation, reason)):
            return f"say that it is stranded in generation {generation}: {reason}"
        case Send(messages.Returned(generation)):
            return f"say that it has returned from generation {generation}"
        case Send(messages.Raised(generation, commit, summary)):
            return f"say that it raised {summary} in generation {generation} at commit {commit}"
        case Send(messages.Leaving(reason)):
            return f"say that it wants to leave: {reason}"
        case Send(message):
            return f"say {message}"


def world(found: re.Match[str]) -> messages.World:
    commit = found["commit"] and Commit(*map(int, found["commit"].split("c")))
    place = Place(1, int(found["size"]), 1, int(found["size"]), 0, 1)
    holders = int(found["holders"] or 0)
    return messages.World(
        int(found["generation"]), place, STORE, holders, commit or None, "because"
    )


GENERATION = r"generation (?P<generation>\d+)"
HEARS: dict[str, Callable[[re.Match[str]], messages.Message]] = {
    r"welcome, a newcomer": lambda found: messages.Welcome(Place(4, 5, 0, 1, 0, 1), True, True),
    r"welcome": lambda found: messages.Welcome(Place(1, 4, 1, 4, 0, 1), False, True),
    rf"{GENERATION}, rank 1 of (?P<size>\d+)(?:, (?P<holders>\d+) hold g(?P<commit>\d+c\d+))?": world,
    rf"{GENERATION} is broken: (?P<reason>.+)": lambda found: messages.Broken(
        int(found["generation"]), found["reason"]
    ),
    rf"prepare change (?P<change>\d+) of {GENERATION}": lambda found: messages.Prepare(
        int(found["generation"]), int(found["change"])
    ),
    rf"stop for change (?P<change>\d+) of {GENERATION} at check (?P<check>\d+)": (
        lambda found: messages.StopAt(
            int(found["generation"]), int(found["change"]), int(found["check"])
        )
    ),
    rf"change (?P<change>\d+) of {GENERATION} is called off": lambda found: messages.Proceed(
        int(found["generation"]), int(found["change"])
    ),
    r"leave: (?P<reason>.+)": lambda found: messages.Leave(found["reason"]),
    rf"finish {GENERATION}": lambda found: messages.Finish(int(found["generation"])),
}


def enters(machine: Recovery, found: re.Match[str]) -> Iterator[str]:
    machine.enter()
    yield from waits(machine, found)


def waits(machine: Recovery, found: re.Match[str]) -> Iterator[str]:
    yield from map(line_of, machine.wait_for_world(STORE, "x" if machine.running else ""))


def adopts(machine: Recovery, found: re.Match[str]) -> Iterator[str]:
    yield f"commit {machine.adopt()}"


def commits(machine: Recovery, found: re.Match[str]) -> Iterator[str]:
    yield f"commit {machine.committed()}"
    yield from checks(machine, found)


def checks(machine: Recovery, found: re.Match[str]) -> Iterator[str]:
    yield DOES[machine.arrive()]


def looks_again(machine: Recovery, found: re.Match[str]) -> Iterator[str]:
    yield DOES[machine.verdict()]


def gives_up(machine: Recovery, found: re.Match[str]) -> Iterator[str]:
    machine.release()
    yield DOES[machine.verdict()]


def fails(machine: Recovery, found: re.Match[str]) -> Iterator[str]:
    yield from map(line_of, machine.fail(machine.generation, found["reason"]))


def returns(machine: Recovery, found: re.Match[str]) -> Iterator[str]:
    yield from map(line_of, machine.returned())


def raises(machine: Recovery, found: re.Match[str]) -> Iterator[str]:
    yield from map(line_of, machine.raised(found["summary"], "Traceback ..."))


def stops(machine: Recovery, found: re.Match[str]) -> Iterator[str]:
    yield f"commit {machine.committed()}"
    yield from waits(machine, found)


DOES_ITSELF: dict[str, Callable[[Recovery, re.Match[str]], Iterator[str]]] = {
    r"it calls init\(\)": waits,
    r"it enters elastic.run": enters,
    r"it restores its commit and waits for a world": waits,
    r"its state is in step with rank 0": adopts,
    r"it comes to commit\(\)": commits,
    r"it comes to check_host_updates\(\)": checks,
    r"it looks again": looks_again,
    r"it has waited long enough": gives_up,
    r"it saves its state and waits for a world": stops,
    r"a collective breaks: (?P<reason>.+)": fails,
    r"its function returns": returns,
    r"user code raises (?P<summary>.+)": raises,
}
