"""The cases, in the order of their run. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """``name``: the module in ``cases``. ``limit_s``: when it is ended, on a real GPU."""

    number: int
    name: str
    limit_s: float
    title: str


CASES = (
    Case(1, "collectives", 70, "the first collective; every operation and dtype"),
    Case(2, "training", 100, "a GPT of 100M parameters: equal on all ranks, and to one rank"),
    Case(3, "restoring", 40, "commit on a busy stream, overwrite, restore: bits"),
    Case(
        4, "killed", 140, "SIGKILL before, in and after the making of a communicator; nothing grows"
    ),
    Case(5, "frozen", 80, "SIGSTOP in the making of a communicator and in a kernel"),
    Case(6, "device_errors", 80, "a GPU that fails under one rank, and under two at once"),
    Case(7, "mixed", 70, "two optimizers, SyncBatchNorm, named collectives, join: no hang"),
    Case(8, "step_time", 140, "a step beside DDP, by bucket size; many small parameters; a trace"),
    Case(9, "commit_cost", 90, "what a commit of 0.1, 1, 4 GB costs, with and without room"),
    Case(
        10, "failpoints", 80, "SIGKILL around reduce, update and commit: commits agree, bit for bit"
    ),
    Case(11, "all_killed", 60, "all workers and the driver are killed: on from a durable commit"),
    Case(12, "exact", 80, "exact training: the same bits after a kill and a join"),
    Case(
        13,
        "trainers",
        150,
        "DDP, a timm-like loop, Lightning, Accelerate, Hugging Face; one killed",
    ),
    Case(14, "marked", 80, "the suite's own tests marked gpu"),
    Case(15, "sharded", 130, "FSDP2 and ZeRO, one of two ranks killed: commits kept, ranks equal"),
    Case(16, "sharded_cost", 130, "FSDP2: a step beside torch's NCCL; a commit of 8 GB"),
)


def chosen(words: str | None) -> list[Case]:
    """``1,4`` or ``killed,frozen``. Raises ValueError for what there is not."""
    if not words:
        return list(CASES)
    by_word = {word: case for case in CASES for word in (str(case.number), case.name)}
    unknown = [word for word in words.split(",") if word not in by_word]
    if unknown:
        raise ValueError(f"there is no case {', '.join(unknown)}; there are {', '.join(by_word)}")
    return [by_word[word] for word in words.split(",")]
