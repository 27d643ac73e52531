"""Where ranks agree on the plans of gradients that are on GPUs."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from elastic import joining, plans, shadow


def test_later_plans_are_agreed_on_the_cpu_wherever_gradients_are():
    """Another communicator of the same GPU costs its memory, and one order of launches more to keep."""
    known = plans.Plans()
    gpu = torch.device("cuda", 1)
    assert shadow.channel_device(known, gpu) == gpu  # the first goes where its gradients will
    wire = plans.Wire(4, "float32", "cuda")
    layout = plans.Layout(1, (0,), 1, 1.0, (0,), (wire,), ())
    known.record(0, layout, None)
    assert shadow.channel_device(known, gpu) == torch.device("cpu")


def test_a_rank_that_joined_waits_for_later_plans_where_the_others_agree(monkeypatch):
    asked: list[str] = []
    rt = SimpleNamespace(wanted=lambda purpose, type, members: asked.append(type))
    known = plans.Plans()
    monkeypatch.setattr(plans, "of", lambda *_: known)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    company = joining._Company(rt, None)  # type: ignore[arg-type]
    assert not company.turn(1.0)
    assert asked == ["cpu", "cuda"]
    known.record(
        0, plans.Layout(1, (0,), 1, 1.0, (0,), (plans.Wire(4, "float32", "cuda"),), ()), None
    )
    asked.clear()
    assert not company.turn(9.0)
    assert asked == ["cpu"]
