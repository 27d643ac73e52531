"""Runs cases one after another, each in separate processes with a deadline, and records their results."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from gpu.listed import Case
from gpu.machine import Machine
from gpu.programs import environment
from harness.program import Program

LEAST_S = 15.0  # with less left no case begins
WORDS = {True: "ok", False: "FAILED", None: "skipped"}
Outcome = dict[str, Any]


def run_all(cases: list[Case], machine: Machine, out: Path, deadline: float) -> int:
    """0: none failed. ``deadline`` is on the monotonic clock; what is then left is skipped."""
    out = out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    print(", ".join(f"{name} {value}" for name, value in machine.versions.items()))
    print(
        f"{machine.gpus} GPUs, {machine.ranks} ranks"
        + f"; {machine.why_few}" * bool(machine.why_few)
    )
    outcomes: list[Outcome] = []
    for case in cases:
        if not machine.made_up and deadline - time.monotonic() < LEAST_S:
            outcome = over(case, None, "no time was left", machine)
        else:
            print(f"{case.number:2} {case.name}: {case.title} ...", flush=True)
            outcome = run_one(case, machine, out, deadline)
        outcomes.append(outcome)
        (out / f"{case.number:02}-{case.name}.json").write_text(
            json.dumps(outcome, indent=1) + "\n"
        )
        whole = {
            "versions": machine.versions,
            "machine": dataclasses.asdict(machine),
            "cases": outcomes,
        }
        (out / "summary.json").write_text(json.dumps(whole, indent=1) + "\n")
        print(
            f"   {WORDS[outcome['ok']]} in {outcome['seconds']} s  {first_line(outcome['reason'])}"
        )
        if case.name == "collectives" and outcome["ok"] is False and machine.shares_a_gpu:
            why = "two ranks on one GPU did not get through the first case"
            machine = dataclasses.replace(machine, ranks=1, why_few=why)
            print(f"   from here on one rank: {why}")
    print_table(outcomes)
    return 1 if any(outcome["ok"] is False for outcome in outcomes) else 0


def run_one(case: Case, machine: Machine, out: Path, deadline: float) -> Outcome:
    """Never raises for what the case does."""
    folder = out / case.name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    asked, told = folder / "machine.json", folder / "result.json"
    machine.write(asked)
    limit_s = case.limit_s * machine.time_factor
    if not machine.made_up:
        limit_s = min(limit_s, deadline - time.monotonic())
    words = [sys.executable, str(Path(__file__).with_name("case_process.py"))]
    began = time.monotonic()
    # By the mark all that it started is found: `environment` keeps it, unlike a name that begins with ELASTIC_.
    program = Program(
        [*words, case.name, str(asked), str(told), str(folder)],
        folder=folder,
        env=environment(machine),
        mark="GPU_CASE",
        called=f"case {case.name}",
    )
    reason = ""
    try:
        program.process.wait(limit_s)
    except subprocess.TimeoutExpired:
        reason = f"it did not end within {limit_s:.0f} s"
        program.process.kill()
    program.end()
    (folder / "case.txt").write_text(program.output)
    found = json.loads(told.read_text()) if told.exists() else {}
    if "ok" not in found:
        last = "\n".join(program.lines[-20:])
        found |= {"ok": False, "reason": f"{reason or 'its process crashed'}\n{last}".strip()}
    return over(case, found["ok"], found["reason"], machine) | {
        "seconds": round(time.monotonic() - began, 1),
        "figures": found.get("figures", {}),
        "left_out": found.get("left_out", {}),
    }


def over(case: Case, ok: bool | None, reason: str, machine: Machine) -> Outcome:
    return {
        "case": case.name,
        "number": case.number,
        "title": case.title,
        "ok": ok,
        "seconds": 0.0,
        "reason": reason,
        "figures": {},
        "left_out": {},
        "ranks": machine.ranks,
        "versions": machine.versions,
    }


def first_line(text: str) -> str:
    return text.partition("\n")[0][:160]


def print_table(outcomes: list[Outcome]) -> None:
    print()
    for outcome in outcomes:
        print(
            f"{outcome['number']:2} {outcome['case']:14} {WORDS[outcome['ok']]:8}"
            f" {outcome['seconds']:6.1f} s  {first_line(outcome['reason'])}"
        )
        for name, value in outcome["figures"].items():
            shown = json.dumps(value)
            print(f"     {name}: {shown if len(shown) < 300 else shown[:300] + ' ...'}")
        for part, why in outcome["left_out"].items():
            print(f"     left out: {part}: {why}")
