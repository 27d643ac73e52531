"""The driver's actions as lines of a scenario. ``h:2`` is the first worker of its slot, ``h:2#2`` the second."""

from __future__ import annotations

from collections.abc import Iterable

from elastic.driver import events
from elastic.driver.monitoring.world_log_lines import recovery_line
from elastic.protocol.messages import Place, Worker


def short(worker: Worker) -> str:
    return str(worker).removesuffix("#1")


def listed(workers: Iterable[Worker]) -> str:
    return " ".join(map(short, workers)) or "nobody"


def placed(place: Place) -> str:
    return f"rank {place.rank} of {place.size}"


def line_of(action: events.Action) -> str:
    """One line, or several."""
    match action:
        case events.StartWorker(worker, place, reason):
            return f"start {short(worker)} as {placed(place)}: {reason}"
        case events.KillWorker(worker, reason):
            return f"kill {short(worker)}: {reason}"
        case events.ProbeWorkers(workers):
            return f"probe {listed(workers)}"
        case events.TellAwaited(_, members, rank, line):
            return f"tell {listed(members)} that they wait for rank {rank}, at {line}"
        case events.DumpStacks(worker, reason):
            return f"dump the stacks of {short(worker)}: {reason}"
        case events.BreakWorld(generation, members, reason):
            return f"break generation {generation}, tell {listed(members)}: {reason}"
        case events.PublishWorld():
            return f"{world_line(action)}: {action.reason}"
        case events.TellWorld(generation, member):
            where = placed(member.place)
            return f"tell {short(member.worker)} again: {where} in generation {generation}"
        case events.WelcomeWorker(worker, place, newcomer):
            as_newcomer = ", a newcomer" if newcomer else ""
            return f"welcome {short(worker)} as {placed(place)}{as_newcomer}"
        case events.PrepareChange(generation, change, members, reason):
            return f"prepare change {change} of generation {generation}, ask {listed(members)}: {reason}"
        case events.StopMembersAt(_, change, check, members):
            return f"stop for change {change} at check {check}, tell {listed(members)}"
        case events.CallOffChange(_, change, members, reason):
            return f"call off change {change}, tell {listed(members)}: {reason}"
        case events.LetGo(worker, reason):
            return f"let {short(worker)} go: {reason}"
        case events.RejectWorker(worker, layout, expected):
            return f"reject {short(worker)}: its state has layout {layout}, expected {expected}"
        case events.TellStandby(worker):
            return f"have {short(worker)} stand by"
        case events.FinishWorld(generation, members):
            return f"finish generation {generation}, tell {listed(members)}"
        case events.HastenCheckpoint(generation, rank0):
            return f"ask {short(rank0)}, rank 0 of generation {generation}, for a checkpoint"
        case events.EndJob(code, reason):
            return f"end the job with exit code {code}: {reason}"
        case events.Report(level, text):
            return f"log {level}: {text}"
        case events.ReportRecovery():
            return f"log info: {recovery_line(action)}"
        case _:
            raise AssertionError(f"no words for {type(action).__name__}")


def world_line(world: events.PublishWorld) -> str:
    members = [member.worker for member in world.members]
    held = world.commit is not None
    source = f"commit {world.commit}" if held else f"the state of {short(members[0])}"
    lacking = members[world.holders :]
    lack = f" ({listed(lacking)} must be sent it)" if held and lacking else ""
    return f"publish generation {world.generation} from {source}, ranks: {listed(members)}{lack}"
