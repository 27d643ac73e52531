"""Arithmetic of DiLoCo, and what a state commits, restores and refuses."""

import contextlib
import copy
import threading
import types
from typing import Any
from unittest.mock import create_autospec

import pytest
import torch

import elastic
from elastic import context
from elastic.collectives.store_group import Broadcast, DistantGroup
from elastic.diloco import diloco as diloco_module
from elastic.errors import Invalid, PeerLost
from elastic.negotiation import submission
from elastic.protocol.messages import Address, Commit, Place, Worker, World
from elastic.rendezvous.store import Store, listen
from elastic.runtime import lifecycle
from elastic.runtime.guarded_groups import StoreExchange
from elastic.runtime.worker_runtime import WorkerRuntime
from elastic.state.fully_sharded.island_shards import IslandShards
from elastic.state.handled_state import EARLY_LIMIT
from elastic.torch_backend.group_names import names
from harness.fakes import collectives as fake
from harness.golden import raises
from harness.groups import at_once


def network(seed=0):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))


def inner_step(model, optimizer, seed):
    points = torch.randn(16, 4, generator=torch.Generator().manual_seed(seed))
    optimizer.zero_grad()
    (model(points) - points.sum(1, keepdim=True)).square().mean().backward()
    optimizer.step()


def bits(model):
    return [each.detach().clone() for each in model.parameters()]


def close(one, other):
    return all(torch.allclose(a, b, atol=1e-6) for a, b in zip(one, other, strict=True))


def test_single_worker_with_outer_rate_one_trains_as_without_diloco():
    plain, model = network(), network()
    alone, inner = (torch.optim.Adam(each.parameters(), lr=0.01) for each in (plain, model))
    outer = torch.optim.SGD(model.parameters(), lr=1.0)
    diloco = elastic.DiLoCo(model, inner, outer, every=4, fragments=2)
    for seed in range(16):
        inner_step(plain, alone, seed)
        inner_step(model, inner, seed)
        diloco.step()
    assert diloco.round == 4
    assert close(bits(plain), bits(model))


def test_outer_step_follows_nesterov_momentum_of_the_pseudo_gradient():
    model = network()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    diloco = elastic.DiLoCo(model, inner, every=3)
    outer = bits(model)
    velocity = None
    for round_ in range(3):
        for seed in range(3):
            inner_step(model, inner, 10 * round_ + seed)
            if seed == 2:
                change = [o - i for o, i in zip(outer, bits(model), strict=True)]
            diloco.step()
        velocity = (
            change
            if velocity is None
            else [0.9 * v + c for v, c in zip(velocity, change, strict=True)]
        )
        outer = [o - 0.7 * (c + 0.9 * v) for o, c, v in zip(outer, change, velocity, strict=True)]
        assert close(bits(model), outer)
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), diloco.outer, strict=True))


def test_delayed_merge_mixes_the_parameters_with_the_outer_ones_of_the_send_step():
    model = network()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    outer = torch.optim.SGD(model.parameters(), lr=1.0)
    diloco = elastic.DiLoCo(model, inner, outer, every=4, delay=2, mix=0.25)
    sent = None
    for step in range(1, 7):
        inner_step(model, inner, step)
        if step == 4:
            sent = bits(model)
        before = bits(model)
        diloco.step()
    assert sent is not None
    wanted = [0.25 * b + 0.75 * s for b, s in zip(before, sent, strict=True)]
    assert diloco.merged == [1]
    assert close(bits(model), wanted) and close(diloco.outer, sent)


def streaming_reference(steps, sends, delay, mix):
    """Return the outer and the inner parameters of one worker, as algorithm 1 of arXiv:2311.08105 computes them.

    With several fragments, a delay or a mixing factor, as arXiv:2501.18512 extends it.

    Args:
        steps: number of inner steps.
        sends: indices of the parameters of the fragment that is sent after an inner step, by the step in a round of 8.
        delay: number of inner steps between a send and a merge.
        mix: weight of the inner parameters.
    """
    model = network()
    inner = list(model.parameters())
    optimizer = torch.optim.SGD(inner, lr=0.1)
    outer = bits(model)
    velocity = [torch.zeros_like(each) for each in outer]
    sent = {}
    for step in range(1, steps + 1):
        inner_step(model, optimizer, step)
        place = (step - 1) % 8 + 1
        with torch.no_grad():
            for i in sends.get(place, ()):
                sent[step + delay, i] = outer[i] - inner[i]
            for i in range(len(outer)):
                if (step, i) not in sent:
                    continue
                change = sent.pop((step, i))
                velocity[i] = 0.9 * velocity[i] + change
                outer[i] = torch.add(outer[i], change.add(velocity[i], alpha=0.9), alpha=-0.7)
                inner[i].copy_(torch.lerp(inner[i], outer[i], 1.0 - mix))
    return outer, inner


@pytest.mark.parametrize(
    ("fragments", "sends", "delay", "mix"),
    [
        (1, {8: (0, 1, 2, 3)}, 0, 0.0),
        (2, {4: (0,), 8: (1, 2, 3)}, 0, 0.0),
        (2, {4: (0,), 8: (1, 2, 3)}, 3, 0.5),
        (4, {2: (0,), 4: (1,), 6: (2,), 8: (3,)}, 1, 0.25),
    ],
)
def test_outer_and_inner_parameters_equal_the_reference_bitwise(fragments, sends, delay, mix):
    model = network()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    diloco = elastic.DiLoCo(model, inner, every=8, fragments=fragments, delay=delay, mix=mix)
    for step in range(1, 45):
        inner_step(model, inner, step)
        diloco.step()
    outer, wanted = streaming_reference(44, sends, delay, mix)
    assert diloco.round == 5
    assert all(map(torch.equal, diloco.outer, outer))
    assert all(map(torch.equal, model.parameters(), wanted))


def test_bfloat16_halves_the_bytes_sent():
    sizes = {}
    for dtype in (None, torch.bfloat16):
        model = network()
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        diloco = elastic.DiLoCo(model, inner, every=2, dtype=dtype)
        for seed in range(2):
            inner_step(model, inner, seed)
            diloco.step()
        sizes[dtype] = diloco.bytes_sent
    assert sizes[None] == 2 * sizes[torch.bfloat16] == 4 * (4 * 8 + 8 + 8 + 1)


def quantized(dtype="int4", steps=0, **options):
    model = network()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    diloco = elastic.DiLoCo(model, inner, every=2, dtype=dtype, **options)
    for seed in range(steps):
        inner_step(model, inner, seed)
        diloco.step()
    return diloco, inner


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, "int4"])
def test_quantized_changes_plus_residuals_are_the_true_changes(dtype):
    diloco, inner = quantized(dtype, outer_optimizer=None)
    diloco.outer_optimizer = torch.optim.SGD(diloco.outer, lr=1.0)
    for seed in range(12):
        inner_step(diloco.model, inner, seed)
        inner_now = torch.cat([each.reshape(-1) for each in bits(diloco.model)])
        residual = torch.cat(diloco._residuals)
        diloco.step()
        if seed % 2:
            outer = torch.cat([each.detach().reshape(-1) for each in diloco.outer])
            # outer - residual of this round: what the worker has, and what it still owes
            owed = outer - torch.cat(diloco._residuals)
            torch.testing.assert_close(owed, inner_now - residual, atol=1e-6, rtol=0.0)
    assert torch.cat(diloco._residuals).any()


@pytest.mark.parametrize(
    ("dtype", "share"), [(torch.int8, 0.52), (torch.float8_e4m3fn, 0.52), ("int4", 0.27)]
)
def test_quantized_bytes_are_at_most_a_share_of_bfloat16_bytes(dtype, share):
    sizes = {}
    for each in (dtype, torch.bfloat16):
        model = torch.nn.Linear(128, 64, bias=False)
        diloco = elastic.DiLoCo(model, None, every=1, dtype=each)
        diloco.step()
        sizes[each] = diloco.bytes_sent
    assert sizes[dtype] <= share * sizes[torch.bfloat16]


def test_residuals_are_committed_and_restored_and_not_sent():
    diloco, inner = quantized()
    state = elastic.TorchState(diloco=diloco)
    for seed in range(2):
        inner_step(diloco.model, inner, seed)
        diloco.step()
    state.save()
    kept = bits_of(diloco._residuals)
    assert kept[0].any()
    for seed in range(2, 4):
        inner_step(diloco.model, inner, seed)
        diloco.step()
    assert not torch.equal(kept[0], diloco._residuals[0])
    state.restore()
    assert torch.equal(kept[0], diloco._residuals[0])
    _, tensors = state._parts()["diloco"].pack()
    assert not any(each.shape == kept[0].shape for each in tensors.values())


@pytest.mark.parametrize("was_sent", [True, False])
def test_residual_is_that_of_the_sent_fragment_or_zero_after_a_merge_without_this_rank(was_sent):
    diloco, _ = quantized(steps=4)
    before = diloco._residuals[0]
    assert before.any()
    errors = torch.full_like(before, 0.5)
    diloco._sent_residual = (0, errors) if was_sent else None
    diloco.adopt(0)
    assert torch.equal(diloco._residuals[0], errors if was_sent else torch.zeros_like(before))
    assert diloco._sent_residual is None


def test_local_sgd_of_one_worker_does_not_change_its_parameters():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    local = elastic.LocalSGD(model, optimizer, every=2)
    for seed in range(4):
        inner_step(model, optimizer, seed)
        before = bits(model)
        local.step()
        assert close(before, bits(model))


def test_restore_returns_inner_and_outer_parameters_to_the_commit():
    model = network()
    inner = torch.optim.Adam(model.parameters())
    diloco = elastic.DiLoCo(model, inner, every=2)
    state = elastic.TorchState(diloco=diloco, step=0)
    for seed in range(3):
        inner_step(model, inner, seed)
        diloco.step()
    state.step = 3
    state.save()
    saved = bits(model), bits_of(diloco.outer), copy.deepcopy(inner.state_dict())
    for seed in range(3, 6):
        inner_step(model, inner, seed)
        diloco.step()
    state.restore()
    assert (diloco.position, diloco.own_steps, diloco.merged, state.step) == (3, 3, [1], 3)
    assert all(map(torch.equal, bits(model), saved[0]))
    assert all(map(torch.equal, diloco.outer, saved[1]))
    for number, entries in saved[2]["state"].items():
        assert all(
            torch.equal(v, inner.state_dict()["state"][number][k]) for k, v in entries.items()
        )


def bits_of(tensors):
    return [each.detach().clone() for each in tensors]


def hand_over(source, target):
    """What a transfer does, without a group."""
    from elastic.state.handlers.tensor_spec import Destination, TensorSpec

    structure, tensors = source.pack()
    structure = copy.deepcopy(structure)
    specs = {name: TensorSpec.of(each) for name, each in tensors.items()}
    fresh = {}
    for name, where in target.destinations(structure, specs, restoring=False).items():
        if isinstance(where, torch.Tensor):
            where.copy_(tensors[name])
        elif where is Destination.NEW:
            fresh[name] = tensors[name].clone()
    target.place(structure, fresh, None, restoring=False)


def worker(seed, steps):
    model = network(seed)
    inner = torch.optim.Adam(model.parameters(), lr=0.01 * (seed + 1))
    diloco = elastic.DiLoCo(model, inner, every=4)
    state = elastic.TorchState(diloco=diloco)
    for number in range(steps):
        inner_step(model, inner, number)
        diloco.step()
    return diloco, state._parts()["diloco"]


def test_joining_worker_receives_outer_parameters_and_options_without_inner_entries():
    old, old_part = worker(0, 6)
    new, new_part = worker(1, 0)
    hand_over(old_part, new_part)
    assert (new.position, new.merged, new.own_steps) == (6, [1], 0)
    for outer, theirs, inner in zip(new.outer, old.outer, new.inner, strict=True):
        assert torch.equal(outer, theirs) and torch.equal(inner, theirs)
    assert not new.inner_optimizer.state
    assert new.inner_optimizer.param_groups[0]["lr"] == 0.01
    assert new.outer_optimizer.state.keys() == set(new.outer)


def test_survivor_that_receives_a_state_keeps_its_own_values():
    _, ahead_part = worker(0, 7)
    behind, behind_part = worker(0, 5)
    kept, entries = bits(behind.model), copy.deepcopy(behind.inner_optimizer.state_dict()["state"])
    hand_over(ahead_part, behind_part)
    assert (behind.position, behind.own_steps, behind.lacks_merges) == (5, 5, False)
    assert all(map(torch.equal, bits(behind.model), kept))
    now = behind.inner_optimizer.state_dict()["state"]
    assert all(torch.equal(now[n]["exp_avg"], entries[n]["exp_avg"]) for n in entries)


def test_survivor_without_a_merge_of_the_received_commit_has_no_digest_until_it_has_caught_up():
    states = [trained_state(steps, 1) for steps in (4, 3)]
    at_once(
        lambda state, group: state.transfer(group, 0, keeps=True),
        states,
        fake.world(2, timeout_s=5.0),
    )
    behind = states[1]
    behind.save()
    assert (behind.diloco.merged, behind.diloco.lacks_merges) == ([0], True)
    assert behind.digest() == 0
    behind.reconcile()  # before init(), it is alone
    assert behind.digest() != 0


@pytest.mark.parametrize("name", ["model", "optimizer"])
def test_state_refuses_the_model_or_inner_optimizer_beside_diloco(name):
    model = network()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    diloco = elastic.DiLoCo(model, inner, every=2)
    with pytest.raises(Invalid):
        elastic.TorchState(diloco=diloco, **{name: {"model": model, "optimizer": inner}[name]})


def test_state_refuses_two_diloco_of_one_model():
    model = network()
    first, second = (elastic.DiLoCo(model, None, every=2) for _ in range(2))
    with pytest.raises(Invalid):
        elastic.TorchState(first=first, second=second)


def test_an_inner_optimizer_of_another_model_is_refused():
    inner = torch.optim.SGD(network().parameters(), lr=0.1)
    with pytest.raises(Invalid):
        elastic.DiLoCo(network(), inner, every=2)


@pytest.mark.parametrize(
    "options",
    [
        {"fragments": 9},
        {"mix": 1.0},
        {"dtype": torch.int32},
        {"dtype": "int2"},
        {"delay": 9},
        {"fragments": 0},
        {"quorum": 2},
        {"grace_s": 0.0},
        {"grace_s": float("inf")},
        {"grace_s": 1.0, "quorum": 0},
        {"grace_s": 1.0, "dtype": torch.float16},
    ],
)
def test_invalid_options_are_refused(options):
    model = network()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(Invalid):
        elastic.DiLoCo(model, inner, every=9, **options)


def test_tokens_with_float16_are_refused():
    model = network()
    diloco = elastic.DiLoCo(model, None, every=2, dtype=torch.float16)
    with raises(Invalid):
        diloco.step(tokens=4)


def test_model_that_averages_gradients_over_all_workers_is_refused():
    distributed: Any = torch.distributed
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        replica = torch.nn.parallel.DistributedDataParallel(network())
        for model in (replica, torch.nn.Sequential(replica)):
            with raises(Invalid):
                elastic.DiLoCo(model, None, every=2)
    finally:
        distributed.destroy_process_group()


def test_first_island_group_under_run_is_refused(monkeypatch):
    monkeypatch.setattr(names, "generation", 3)
    with raises(Invalid):
        elastic.island_group()


@pytest.mark.parametrize("tokens", [None, 3])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.int8])
def test_tokens_of_one_worker_do_not_change_its_mean(dtype, tokens):
    model = network()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    diloco = elastic.DiLoCo(
        model, inner, torch.optim.SGD(model.parameters(), lr=1.0), every=2, dtype=dtype
    )
    for seed in range(2):
        inner_step(model, inner, seed)
        before = bits(model)
        diloco.step(tokens)
    atol = {None: 1e-6, torch.bfloat16: 1e-3, torch.int8: 1e-3}[dtype]
    assert all(torch.allclose(a, b, atol=atol) for a, b in zip(before, diloco.outer, strict=True))


def test_steps_without_any_token_leave_the_outer_parameters():
    model = network()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    diloco = elastic.DiLoCo(model, inner, every=1)
    before = bits_of(diloco.outer)
    inner_step(model, inner, 0)
    diloco.step(tokens=0)
    assert all(map(torch.equal, before, diloco.outer))


@pytest.mark.parametrize("given", ["sgd", torch.optim.SGD])
def test_an_outer_optimizer_of_another_type_is_refused(given):
    model = torch.nn.Linear(2, 2)
    with pytest.raises(Invalid):
        elastic.DiLoCo(model, torch.optim.SGD(model.parameters(), lr=0.1), given, every=4)


def test_used_outer_optimizer_is_refused():
    model = network()
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    inner_step(model, inner, 0)
    for outer in (inner, torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)):
        with pytest.raises(Invalid):
            elastic.DiLoCo(model, None, outer, every=2)


@pytest.mark.parametrize("grace_s", [(1.0, None), (None, 1.0), (1.0, 1.0)])
def test_second_diloco_is_refused_beside_one_with_a_quorum(grace_s):
    first, second = (elastic.DiLoCo(network(), None, every=2, grace_s=each) for each in grace_s)
    with pytest.raises(Invalid):
        elastic.TorchState(first=first, second=second).reconcile()


@pytest.mark.parametrize("grace_s", [1.0, None])
def test_workers_stop_at_one_safepoint_unless_their_merges_wait_for_late_ones(grace_s, monkeypatch):
    rt = create_autospec(WorkerRuntime, instance=True)
    rt.env = types.SimpleNamespace(worker=Worker("h", 0, 2))
    state = elastic.TorchState(diloco=elastic.DiLoCo(network(), None, every=2, grace_s=grace_s))
    monkeypatch.setattr(lifecycle, "current", lambda: rt)
    assert state.stop_group() == ("worker h:0#2" if grace_s else "")


@pytest.mark.parametrize("error", [PeerLost("lost h:0#1"), None])
def test_sharded_island_keeps_the_position_that_the_islands_have_agreed_on(error, monkeypatch):
    state = trained_state(5, 1)
    shards = IslandShards.__new__(IslandShards)  # without a sharded model
    shards._diloco, shards._position = state.diloco, 5
    monkeypatch.setattr(state, "_island_shards", lambda: [shards])
    monkeypatch.setattr(shards, "recover", lambda: None)

    def meet():
        state.diloco.rounds.position = 9  # that of another island
        if error is not None:
            raise error

    monkeypatch.setattr(state.diloco, "reconcile", meet)
    with contextlib.suppress(PeerLost):
        state.reconcile()
    assert shards._position == 9


def sent_bytes(states, keeps):
    groups = fake.world(len(states), timeout_s=5.0)
    return at_once(lambda state, group: state.transfer(group, 0, keeps=keeps), states, groups)[0]


def never():
    raise AssertionError("the ranks need no connection")


def test_survivors_need_no_connection():
    states = [trained_state(steps, 1) for steps in (7, 5)]
    met, blobs, exchanges = threading.Barrier(2), {}, []

    def receive(state, group):
        def start(blob):
            exchanges.append(group.rank)
            blobs[group.rank] = blob
            met.wait(5.0)
            found = [blobs[0], blobs[1]]
            met.wait(5.0)
            return lambda: found

        return state.transfer(DistantGroup(group.rank, 2, start, never), 0, keeps=True)

    at_once(receive, states, fake.world(2, timeout_s=5.0))
    assert sorted(exchanges) == [0, 1]  # one round trip


def test_survivor_takes_the_values_of_rank_0_without_a_message_if_it_knows_the_first_broadcast():
    ahead, behind = (with_loader(steps) for steps in (7, 5))
    (content, _), (_, reply) = ahead.first_broadcast(), behind.first_broadcast()
    for state in (ahead, behind):
        state.reset()  # happens after the workers have become ready
    kept = bits_of([*behind.diloco.inner, *behind.diloco.outer])

    def receive(state, group):
        known = Broadcast(content, [reply])
        return state.transfer(
            DistantGroup(group.rank, 2, lambda blob: never(), never, known), 0, keeps=True
        )

    at_once(receive, [ahead, behind], fake.world(2, timeout_s=5.0))
    behind.reset()
    assert behind.step == 7
    assert behind.loader.state_dict() == ahead.loader.state_dict()
    assert all(map(torch.equal, kept, bits_of([*behind.diloco.inner, *behind.diloco.outer])))


def test_state_without_diloco_or_with_large_or_unsendable_values_has_no_first_broadcast():
    assert elastic.TorchState(model=network(), step=0).first_broadcast() is None
    state = elastic.TorchState(diloco=trained_state(1, 1).diloco, value=Unsent())
    assert state.first_broadcast() is None
    state = elastic.TorchState(diloco=trained_state(1, 1).diloco, value=bytes(2 * EARLY_LIMIT))
    assert state.first_broadcast() is None


def test_means_of_two_objects_of_a_state_that_are_in_flight_together_have_different_names(
    monkeypatch,
):
    started = []

    def start(tensors, name, op, **options):
        started.append(name)
        return -1

    monkeypatch.setattr(submission, "start_allreduce", start)
    monkeypatch.setattr(
        diloco_module, "_context", lambda: create_autospec(WorkerRuntime, instance=True)
    )
    objects = [elastic.DiLoCo(network(), None, every=4, delay=2) for _ in range(3)]
    elastic.TorchState(diloco=objects[0], other=objects[1])
    for each in objects:
        each._send(0, (0, 1), None)
    assert started == ["diloco.0", "diloco.other.0", "diloco.0"]  # the last one is in no state


class Unsent:
    """Value that can be copied, but not pickled."""

    def __deepcopy__(self, memo):
        return self

    def __reduce__(self):
        raise TypeError("not pickled")


def with_loader(steps):
    """Return the state of a worker that has committed after so many steps."""
    trained = trained_state(steps, 1)
    loader = elastic.data.DataLoader(list(range(64)), batch_size=2, shuffle=True)
    state = elastic.TorchState(diloco=trained.diloco, loader=loader, step=0)
    for _ in zip(range(steps), loader, strict=False):
        state.step += 1
    state.save()
    return state


def trained_state(steps, fragments):
    model = network()
    inner = torch.optim.Adam(model.parameters(), lr=0.01)
    diloco = elastic.DiLoCo(model, inner, every=4, fragments=fragments)
    for number in range(steps):
        inner_step(model, inner, number)
        diloco.step()
    return elastic.TorchState(diloco=diloco)


def newcomer_of(steps, fragments):
    return [trained_state(each, fragments) for each in (steps, 0)]


def momentum(diloco):
    state = diloco.outer_optimizer.state
    return [state[each]["momentum_buffer"] for each in diloco.outer]


@pytest.mark.parametrize(
    ("steps", "omits"), [((7, 5, 6), True), ((9, 5, 6), True), ((7, 5, 0), False)]
)
def test_transfer_sends_outer_parameters_only_if_a_receiver_has_not_taken_a_step(steps, omits):
    states, others = ([trained_state(each, 1) for each in steps] for _ in range(2))
    kept = [bits_of(each.diloco.outer) for each in states]
    everything, found = sent_bytes(others, False), sent_bytes(states, True)
    root = states[0].diloco
    # A worker without a step receives everything: what is sent in addition describes the versions of the tensors.
    versions = sent_bytes(newcomer_of(steps[0], 1), True)
    versions -= sent_bytes(newcomer_of(steps[0], 1), False)
    values = sum(each.nbytes for each in root.outer + momentum(root))
    assert everything - (found - versions) == (values if omits else 0)
    for state, taken, before in zip(states, steps, kept, strict=True):
        assert all(map(torch.equal, state.diloco.outer, before if taken else root.outer))


class DistantRank:
    """Runtime of a rank on a host of its own, which exchanges reports through a store."""

    def __init__(self, rank: int, store: Store) -> None:
        self.rt: Any = create_autospec(WorkerRuntime, instance=True)
        self.rt.place = Place(rank, 2, 0, 1, rank, 2)
        self.rt.provisional, self.rt.generation = False, 4
        self.rt.world = World(4, self.rt.place, Address("h", 1), 1, Commit(3, 7), "rank 1 lags")
        self.rt.guard.side_effect = lambda name: contextlib.nullcontext()
        self.rt.start_exchange.side_effect = lambda key, blob: StoreExchange(
            store, key, rank, 2, blob, 10.0
        )


@pytest.mark.parametrize("early", [(0, 1), (0,), (1,), (), (0, 0, 1, 1)])
@pytest.mark.parametrize(("limit", "negotiated"), [(diloco_module.REPORT_LIMIT, 0), (10, 2)])
def test_distant_ranks_compare_reports_through_the_store_unless_long(
    limit, negotiated, early, monkeypatch
):
    monkeypatch.setattr(diloco_module, "REPORT_LIMIT", limit)
    listener = listen("127.0.0.1")
    served = Store(listener.address, listener, 10.0, generation=4)
    served.open()
    states, local = newcomer_of(7, 2), threading.local()
    met, reports, shared = threading.Barrier(2), {}, states[0].diloco.rounds.shared()

    def agree(kind, name, report):
        rank = local.rt.place.rank
        reports[rank] = report
        met.wait(10.0)
        return [reports[0], reports[1]]

    monkeypatch.setattr(lifecycle, "active", lambda: local.rt)
    monkeypatch.setattr(context, "current", lambda: local.rt)
    negotiate = create_autospec(agree, side_effect=agree)
    monkeypatch.setattr(submission, "agree", negotiate)

    def enter(state, rank):
        local.rt = DistantRank(rank, served).rt
        diloco = state.diloco
        for _ in range(early.count(rank)):
            diloco.begin_reconcile()
        met.wait(10.0)
        if rank == 1:
            diloco.take_shared(shared)
        diloco.reconcile()
        return diloco.position

    try:
        assert at_once(enter, states, [0, 1]) == [7, 7]
    finally:
        served.close()
    assert negotiate.call_count == negotiated
