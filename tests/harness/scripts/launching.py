"""Launches functions on workers and prints the results: ``launching.py WHAT``."""

from __future__ import annotations

import json
import os
import sys

import elastic


def place(word: str, mark: str = "") -> tuple[str, int, int]:
    import light  # type: ignore[import-not-found]  # noqa: F401
    import torch

    import elastic

    elastic.init()
    total = elastic.allreduce(torch.ones(1), op=elastic.Sum, name="ones")
    return word + mark, elastic.rank(), int(total)


def large() -> bytes:
    return b"x" * 5_000_000


def fails(rank: int) -> int:
    if int(os.environ["HOROVOD_RANK"]) == rank:
        raise ValueError("this sample is damaged")
    return 1


def elastic_training(steps: int, victim: int) -> tuple[int, int, list[int]]:
    """Return step, size and the steps of this process."""
    import signal

    import light  # noqa: F401
    import torch

    import elastic

    slot = int(os.environ["ELASTIC_WORKER"].rpartition(":")[2].partition("#")[0])
    elastic.init()
    state = elastic.ObjectState(step=0)
    seen = []

    @elastic.run
    def train(state: elastic.ObjectState) -> int:
        while state.step < steps:
            elastic.allreduce(torch.ones(1), name="ones")
            if state.step == 5 and slot == victim:
                os.kill(os.getpid(), signal.SIGKILL)
            state.step += 1
            seen.append(state.step)
            state.commit()
        return int(state.step)

    return train(state), elastic.size(), seen


def attempt(**arguments: object) -> str:
    try:
        elastic.launch(place, ("hello",), **arguments)  # type: ignore[arg-type]
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def main(what: str) -> None:
    result: object
    match what:
        case "results":
            result = elastic.launch(place, ("hello",), {"mark": "!"}, np=3)
        case "large":
            result = [len(blob) for blob in elastic.launch(large, np=2)]
        case "horovod":
            import horovod

            result = horovod.run(place, args=("hello",), kwargs={"mark": "!"}, num_proc=2)
        case "failure":
            try:
                result = elastic.launch(fails, (1,), np=2)
            except elastic.JobFailed as error:
                result = str(error)
        case "elastic":
            import horovod

            flags = {"num_proc": 3, "min_num_proc": 2, "cooldown_range": (60, 60)}
            result = horovod.run(elastic_training, (10, 0), **flags)
        case "bad arguments":
            result = [
                attempt(np=2, min_np=3),
                attempt(np=1, hosts="localhost:many"),
                attempt(np=1, executable="/nowhere/python"),
            ]
        case "loop":
            import asyncio

            async def notebook() -> list[object]:
                return elastic.launch(place, ("hello",), np=1)

            result = asyncio.run(notebook())
    print("result", json.dumps(result), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
