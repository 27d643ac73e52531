"""No file uses private names of another file's objects."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from harness.sources import INSTALLED, ROOT, Facts, Use, facts, facts_of, sources

# Public names of an optimizer or a state are torch's and the user's: what inherits from ours shares private ones.
SPREAD = (
    "elastic/optimizer/adasum_optimizer.py",
    "elastic/state/handled_state.py",
    "driver/commandline/options/argument_parser.py",  # of argparse
    "elastic/mxnet/optimizer.py",  # of Gluon's trainer
    "elastic/integrations/",  # of trainers, whose loops are private
    "horovod/spark/",  # of pyspark.ml's parameters
)
FOREIGN = (torch.Tensor, torch.nn.Module(), os)  # have private names that others may use


def product() -> dict[Path, Facts]:
    return {file: facts(file) for file in sources(*INSTALLED, "tests/stress")}


def reaches(uses: list[Use], names: set[str]) -> list[str]:
    """Uses of private ``names`` on what is another file's object."""
    return [
        f"line {use.line}: {use.text}"
        for use in uses
        if not use.of_self and use.name in names and not any(hasattr(f, use.name) for f in FOREIGN)
    ]


def test_no_file_uses_private_names_of_another_files_objects():
    names = set().union(*(each.given for each in product().values()))
    found = {str(f): lines for f, each in product().items() if (lines := reaches(each.uses, names))}
    assert not found


def test_no_subclass_uses_private_names_of_a_base_class_in_another_file():
    """One that inherits from another file's uses what is public there."""
    found = {
        f"{file}:{use.line}: {use.text}"
        for file, each in product().items()
        if not str(file.relative_to(ROOT)).startswith(SPREAD)
        for use in each.uses
        if use.of_self
    }
    assert not found, "\n".join(sorted(found))


@pytest.mark.parametrize(
    ("line", "heard"),
    [
        ("runtime._link.poke()", ["line 1: runtime._link"]),
        ("self.session._link.poke()", ["line 1: self.session._link"]),
        ("self._link.poke()", []),
        ("class A:\n  def f(self, other):\n    self._link = other._link", []),  # of its own kind
        ("tensor._version", []),
    ],
)
def test_uses_of_private_names_of_foreign_objects_are_recognized(line, heard):
    assert reaches(facts_of(line).uses, {"_link", "_version"}) == heard


# Names that nobody in the field uses, each with what it is called now: the words of the field came in their place.
GIVEN_UP = dict(
    pair.strip().split(" now ")
    for pair in """
    Offer now RequestList; Settled now Response; Offers now ResponseCache; OneSet now MessageTable
    Seats now Topology; Lane now InterNodeGroup; Row now RankInfo; Way now Backend
    Hub now ControllerServer; OwnLine now LocalController; Graveyard now DeferredCloser; bury now close_later
    Directly now ByAddress; ThroughAgent now ByTorchelasticStore; ThroughFile now ByFile
    Left now Rank0Endpoint; Met now FoundRank0; forget_commit now discard_commit
    Standing now WorkerRecord; Orders now ActionList; Inquest now RootCauseSearch; accuse now name_root_cause
    punish now record_failure; let_go now release; Patience now GiveUpRules; patience now give_up
    Over now JobFinished; Past now RecoveredJob; Upkeep now SnapshotPolicy; lead now campaign
    Hire now Attach; Refused now Reject; Dismissed now Detach; Terms now AttachOutcome; Agency now AgentState
    Surroundings now JobIO; surroundings now open_job_io; Blow now RandomFault; in_thread now to_thread
    Attended now ChildProcess; Partings now ExitBarrier; last_word now drain
    Fleet now AgentManager; Workforce now WorkerPool; Deposed now LeadershipLost; Insistent now RetryingKV
    OperatorDesk now OperatorService; Claims now PlacementGroupPool; Shadow now JoinedRank; Why now ReasonKind
    Skeleton now StateStructure; Regions now Allocator; Dealing now SamplePartition; Torn now IncompleteCommit
    Strangers now PendingHandshakes; Unanswered now RayUnavailable; Weather now FaultConditions
    SignsOfLife now LivenessProbes; WardenProcess now OrphanReaper; Overheard now ObservedDiscovery
    Piecewise now SegmentedRecord; Anatomy now ModelTensors; Reach now PartitionDetector
    """.replace("\n", ";").split(";")
    if pair.strip()
)


def test_no_replaced_name_is_used_again():
    found = {
        f"{name} in {file.relative_to(ROOT)}": f"call it {GIVEN_UP[name]}"
        for file, each in product().items()
        for name in GIVEN_UP.keys() & {*each.functions, *(cls for cls, *_ in each.classes)}
    }
    assert not found
