"""Plays a scenario in plain text: lines that begin with ``>`` are events, and indented lines are the expected answers.

    Title

    A paragraph about the purpose. Prose may be anywhere between the events.

    machine: driver                                    or: worker
    settings: np=4 workers_min=2 workers_max=4
    given: all train                                   or: all are in init(); nothing
    breaks: EQUAL DIGESTS                              but for this one, every invariant is checked on the way

    > h:2 exits with signal 9
        0.001  break generation 2, tell h:0 h:1 h:3: lost h:2#1 (signal 9 SIGKILL)

Times are seconds since the story began; each line takes a millisecond, and ``> 5 s pass`` what it says, with all
deadlines on the way. `played` gives the text back with the answers of the present code.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from itertools import groupby
from typing import Any, Protocol

from elastic.chaos.invariants.invariants import BrokenInvariant, Invariants
from elastic.driver import events
from elastic.driver.membership.membership import Membership
from elastic.driver.settings import Settings
from elastic.protocol.messages import Commit
from harness import conversation as words
from harness.conversation import MembershipConversation, worker
from harness.scenario_words import line_of
from harness.scenario_worker import WorkerStory

INDENT = "    "


class Story(Protocol):
    """A machine under test."""

    def happens(self, line: str) -> Iterator[str]:
        """Return the answers, one per line. Raises ValueError for an invalid line."""
        ...


def played(text: str) -> str:
    """Return the scenario with its current answers."""
    lines = [line for line in text.splitlines() if not line.startswith(INDENT)]
    said = dict(re.findall(r"^(machine|settings|given|breaks): (.+)$", text, re.MULTILINE))
    story: Story
    if said.get("machine", "driver") == "worker":
        story = WorkerStory()
    else:
        given, breaks = said.get("given", "nothing"), said.get("breaks", "")
        story = DriverStory(said.get("settings", ""), given, breaks)
    out: list[str] = []
    for line in lines:
        out.append(line.rstrip())
        if line.startswith(">"):
            out += [INDENT + answer for answer in story.happens(line[1:].strip())]
    return "\n".join(out) + "\n"


def title_of(text: str) -> str:
    return text.splitlines()[0]


def paragraph_of(text: str) -> str:
    """Return its purpose: the first paragraph after the title, as one line."""
    return " ".join(text.split("\n\n")[1].split())


class Recorded(Membership):
    """Records received messages and answers."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.heard: list[tuple[float, events.Event, list[events.Action]]] = []

    def handle(self, event: events.Event, now: float, *, more: bool = False) -> list[events.Action]:
        entry: tuple[float, events.Event, list[events.Action]] = (now, event, [])
        self.heard.append(entry)  # before an answer to a probe
        entry[2].extend(super().handle(event, now, more=more))
        return entry[2]


class DriverStory(MembershipConversation):
    """The driver's Membership. Every invariant is checked, except the one that the scenario ``breaks``."""

    def __init__(self, settings: str, given: str, breaks: str) -> None:
        named = [pair.split("=") for pair in settings.split()]
        super().__init__(**{name: number(value) for name, value in named})
        self.m: Recorded = Recorded(self.m.settings)
        self.invariants = Invariants(self.m.settings)
        self._told = 0
        self._breaks = breaks
        match given.split(" on "):
            case ["nothing"]:
                pass
            case ["all are in init()" | "all train" as how, *rest]:
                self._set_up(rest[0] if rest else f"h={self.m.settings.np}", how == "all train")
            case _:
                raise ValueError(f"given: {given}; expected nothing, all are in init(), all train")
        list(self._news())
        self._began = self.now

    def _set_up(self, places: str, train: bool) -> None:
        slots = slots_of(places)
        names = [f"{host}:{slot}" for host, count in slots.items() for slot in range(count)]
        names = names[: self.m.settings.workers_max]
        self.tell(events.HostsChanged(slots))
        self.connect(*names)
        self.ready(*names, running=False)
        if train:
            self.ready(*names)
            self.resume()

    def happens(self, line: str) -> Iterator[str]:
        for pattern, happen in LINES.items():
            found = re.fullmatch(pattern, line)
            if found:
                happen(self, found)
                return self._news()
        for pattern, event in SAID.items():
            found = re.fullmatch(rf"{WHO} {pattern}", line)
            if found:
                for name in found["who"].split():
                    self.tell(event(self, name, found))
                return self._news()
        raise ValueError(f"{line!r} is nothing that can happen; see LINES and SAID in {__file__}")

    def _news(self) -> Iterator[str]:
        answers: list[tuple[float, str]] = []
        heard, self._told = self.m.heard[self._told :], len(self.m.heard)
        for now, event, actions in heard:
            try:
                self.invariants.saw(now, event, actions)
            except BrokenInvariant as error:
                if not self._breaks or not str(error).startswith(self._breaks):
                    raise
                answers.append((now, f"broken invariant: {self._breaks}"))
            answers += [(now, line_of(action)) for action in actions]
        began = getattr(self, "_began", 0.0)
        for text, same in groupby(answers, key=lambda pair: pair[1]):
            times = [f"{now - began:.3f}" for now, _ in same]
            again = f" (again, the last of {len(times)} times at {times[-1]})"
            first, *rest = text.splitlines()
            yield f"{times[0]:>7}  {first}{again if len(times) > 1 else ''}"
            yield from (f"{'':9}{line}" for line in rest)

    def generation_of(self, name: str) -> int:
        """Return the generation of an event; by default the current one for a member."""
        return self.m.generation if worker(name) in self.m.members else 0


# ---- events --------------------------------------------------------------------------------------------------------


def number(text: str) -> Any:
    if text in ("True", "False"):
        return text == "True"
    return float(text) if "." in text else int(text)


def slots_of(text: str) -> dict[str, int]:
    """Parse ``h=2, g=1``."""
    return {host: int(count) for host, count in (pair.split("=") for pair in text.split(", "))}


def commit_of(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    generation, _, count = text.removeprefix("g").partition("c")
    return int(generation), int(count)


def restart(story: DriverStory, found: re.Match[str]) -> None:
    story.tell(events.DriverRestarted())


def works(story: DriverStory, found: re.Match[str]) -> None:
    for name in found["who"].split():
        if found["what"].startswith("compute"):
            story.works(name, cpu=1.0)
        else:
            story.works(name, traced="debugger" in found["what"])


Happening = Callable[[DriverStory, re.Match[str]], Any]
Saying = Callable[[DriverStory, str, re.Match[str]], events.Event]

NAME = r"\w+:\d+(?:#\d+)?"
WHO = rf"(?P<who>{NAME}(?: {NAME})*)"
COMMIT = r"g(?P<commit>\d+c\d+)"
LINES: dict[str, Happening] = {
    r"(?P<s>[\d.]+) s pass": lambda story, found: story.wait(float(found["s"])),
    r"the hosts are (?P<hosts>.+)": lambda story, found: story.tell(
        events.HostsChanged(slots_of(found["hosts"]))
    ),
    r"(?P<hosts>\d+) hosts? waits? in the queue": lambda story, found: story.tell(
        events.HostsQueued(int(found["hosts"]))
    ),
    r"the list of hosts is empty": lambda story, found: story.tell(events.HostsChanged({})),
    r"host (?P<host>\w+) is lost": lambda story, found: story.tell(words.host_lost(found["host"])),
    r"the driver is restarted": restart,
    r"the machine of (?P<host>\w+) goes away(?P<alone>, with the driver,)?(?: in (?P<s>[\d.]+) s)?": (
        lambda story, found: story.tell(
            events.HostLeaving(
                found["host"],
                events.Notice("AWS takes it back", float(found["s"]) if found["s"] else None),
                bool(found["alone"]),
            )
        )
    ),
    r"the machine of (?P<host>\w+) stays": lambda story, found: story.tell(
        events.HostStaying(found["host"])
    ),
    r"commit g(?P<commit>\d+c\d+) is durable": lambda story, found: story.tell(
        events.CheckpointMade(Commit(*map(int, found["commit"].split("c"))))
    ),
    rf"all are spoilt by commit {COMMIT}(?:, by (?P<by>{NAME}))?": lambda story, found: story.tell(
        events.ReplicasSpoilt(
            story.m.generation,
            Commit(*map(int, found["commit"].split("c"))),
            [worker(found["by"])] if found["by"] else [],
            2,
        )
    ),
    r"the job is asked to stop: (?P<reason>.+)": lambda story, found: story.tell(
        events.StopRequested(found["reason"])
    ),
    # Results of probes from now on.
    rf"{WHO} (?P<what>(?:does|do) nothing|computes?|(?:is|are) held by a debugger)": works,
}
SAID: dict[str, Saying] = {
    r"connects?": lambda story, name, found: words.connected(name),
    r"reconnects?": lambda story, name, found: events.WorkerReconnected(
        worker(name), story.generation_of(name), True
    ),
    rf"(?:is|are) ready(?: with commit {COMMIT})?(?: and has layout (?P<layout>\w+))?": (
        lambda story, name, found: words.ready(
            name,
            story.generation_of(name),
            commit_of(found["commit"]),
            layout=found["layout"] or "x",
        )
    ),
    r"waits? in init\(\)": lambda story, name, found: words.ready(
        name, story.generation_of(name), running=False
    ),
    r"resumes?": lambda story, name, found: words.resumed(name, story.m.generation),
    r"returns?": lambda story, name, found: words.returned(name, story.m.generation),
    r"exits? with signal (?P<signal>\d+)": lambda story, name, found: words.exited(
        name, -int(found["signal"])
    ),
    r"exits? with code (?P<code>\d+)": lambda story, name, found: words.exited(
        name, int(found["code"])
    ),
    r"can not be started: (?P<reason>.+)": lambda story, name, found: words.exited(
        name, 127, reason=found["reason"]
    ),
    r"loses its connection": lambda story, name, found: words.disconnected(name),
    r"(?:is|are) cut off": lambda story, name, found: words.disconnected(name, silent=True),
    r"reports? a broken collective": lambda story, name, found: words.failed(
        name, story.m.generation
    ),
    r"reports? a broken collective, and can't recover": lambda story, name, found: words.stranded(
        name, story.m.generation
    ),
    r"(?:has|have) passed (?P<checks>\d+) checks?": lambda story, name, found: words.checked(
        name, story.m.generation, int(found["checks"]), story.m.worlds.change.number
    ),
    r"gets? SIGTERM": lambda story, name, found: words.leaving(name),
    rf"raises? (?P<summary>.+?) at commit {COMMIT}": lambda story, name, found: words.raised(
        name, story.m.generation, commit_of(found["commit"]), found["summary"]
    ),
    r"freezes?": lambda story, name, found: words.frozen(name),
    r"thaws?": lambda story, name, found: words.thawed(name),
    r"waits? in '(?P<collective>.+)'": lambda story, name, found: words.inside(
        name, story.m.generation, found["collective"]
    ),
    r"(?:is|are) in user code again": lambda story, name, found: words.outside(
        name, story.m.generation
    ),
    r"begins? the long phase '(?P<phase>.+)'": lambda story, name, found: words.outside(
        name, story.m.generation, phase=found["phase"]
    ),
    rf"(?:has|have) digest (?P<digest>\w+) under commit {COMMIT}": lambda story, name, found: (
        events.WorkerDigested(
            worker(name),
            story.m.generation,
            Commit(*map(int, found["commit"].split("c"))),
            int(found["digest"], 16),
        )
    ),
}
