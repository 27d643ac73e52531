"""Where ranks agree on the plans of gradients that are on GPUs."""

from __future__ import annotations

from unittest.mock import create_autospec

import torch

from elastic.optimizer import join
from elastic.optimizer.gradients import joined_rank, plan_agreement
from elastic.runtime.worker_runtime import WorkerRuntime


def test_later_plans_are_agreed_on_the_cpu_wherever_gradients_are():
    """Another communicator of the same GPU costs its memory, and one order of launches more to keep."""
    known = plan_agreement.Plans()
    gpu = torch.device("cuda", 1)
    assert joined_rank.channel_device(known, gpu) == gpu  # the first goes where its gradients will
    wire = plan_agreement.BucketSpec(4, "float32", "cuda")
    layout = plan_agreement.StepPlan(1, (0,), 1, 1.0, 1, (0,), (wire,), ())
    known.record(0, layout, None)
    assert joined_rank.channel_device(known, gpu) == torch.device("cpu")


def test_joined_rank_waits_for_later_plans_on_the_cpu_group(monkeypatch):
    asked: list[str] = []
    rt = create_autospec(WorkerRuntime, instance=True)
    rt.wanted.side_effect = lambda purpose, type, members: asked.append(type)
    known = plan_agreement.Plans()
    monkeypatch.setattr(plan_agreement, "of", lambda *_: known)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    plans = join._SharedPlans(rt, None)
    assert not plans.turn(1.0, False)
    assert asked == ["cpu", "cuda"]
    known.record(
        0,
        plan_agreement.StepPlan(
            1, (0,), 1, 1.0, 1, (0,), (plan_agreement.BucketSpec(4, "float32", "cuda"),), ()
        ),
        None,
    )
    asked.clear()
    assert not plans.turn(9.0, False)
    assert asked == ["cpu"]
