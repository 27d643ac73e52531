"""Fully sharded models in a state: banks, headers, going back in one world, and another mesh for the same objects."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import distributed, nn

from elastic.collectives.dtensor import is_dtensor
from elastic.collectives.shared_memory import arena
from elastic.errors import Fixed, Invalid, NotElastic
from elastic.exact.shards import Shards
from elastic.runtime import lifecycle
from elastic.sharding import fsdp2, unsupported_sharding
from elastic.sharding.resharding import ReshardingMove
from elastic.sharding.row_layout import Rows
from elastic.sharding.shard_inventory import CommitId
from elastic.state import TorchState
from elastic.state.fully_sharded import peer_arena
from elastic.state.fully_sharded.shard_buffers import ShardBuffers
from elastic.state.fully_sharded.sharded_handlers import LiveShard, RowSpec
from elastic.state.handled_state import shards_of
from elastic.state.state import hold, options_of
from elastic.torch_backend import sharding_guard
from harness.fakes.process_group import only_rank

pytestmark = [
    pytest.mark.slow,  # imports of torch's
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture
def four():
    """Four ranks, of which three are made up, and this one is rank 1."""
    with only_rank(1, 4):
        yield


def network() -> Any:
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 1))
    fully_shard(model[0])
    return fully_shard(model)


def give_gradients(model: Any) -> None:
    for each in model.parameters():
        each.grad = fsdp2.as_sharded(torch.randn_like(each._local_tensor), each, None)


def bits(model: Any, optimizer: Any) -> list[torch.Tensor]:
    found = [each._local_tensor.clone() for each in model.parameters()]
    found += [each.clone() for each in model.buffers()]
    for parameter in model.parameters():
        for entry in optimizer.state.get(parameter, {}).values():
            found.append((entry._local_tensor if is_dtensor(entry) else entry).clone())
    return found


def equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


class OwnSave(TorchState):
    """Keeps a value that no commit of shards has."""

    def save(self) -> None:
        super().save()
        self.kept = self.step


class OwnRestore(TorchState):
    def restore(self) -> None:
        super().restore()
        self.kept = 0


@pytest.mark.parametrize("kind", [OwnSave, OwnRestore])
def test_subclass_that_overrides_save_or_restore_is_refused_for_a_sharded_model(four, kind):
    model = network()
    with pytest.raises(Invalid):
        kind(model=model, optimizer=torch.optim.SGD(model.parameters()), step=0)
    plain = nn.Linear(2, 1)
    kind(model=plain, optimizer=torch.optim.SGD(plain.parameters()), step=0)


@pytest.mark.parametrize("when", ["before all", "between"])
def test_an_optimizer_made_before_fully_shard_is_refused(four, when):
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 1))
    if when == "between":
        fully_shard(model[0])
    optimizer = torch.optim.SGD(model.parameters())
    fully_shard(model)
    with pytest.raises(NotElastic) as refused:
        TorchState(model=model, optimizer=optimizer)
    assert refused.value.kind is Fixed.PARAMETERS


def test_second_optimizer_of_a_plain_model_is_accepted_beside_a_sharded_model(four):
    model, head = network(), nn.Linear(1, 1)
    one, two = (torch.optim.SGD(each.parameters()) for each in (model, head))
    TorchState(model=model, head=head, one=one, two=two)


def replace_module(model: Any, optimizer: Any) -> None:
    from torch.distributed.fsdp import fully_shard

    model[2] = nn.Linear(7, 1)
    fully_shard(model[2])


def replace_module_and_its_place_in_the_optimizer(model: Any, optimizer: Any) -> None:
    replace_module(model, optimizer)
    optimizer.param_groups[0]["params"] = list(model.parameters())


def replace_module_by_a_plain_one(model: Any, optimizer: Any) -> None:
    model[2] = nn.Linear(7, 1)


def add_parameter(model: Any, optimizer: Any) -> None:
    model[1].register_parameter("scale", nn.Parameter(torch.ones(1)))


def remove_module(model: Any, optimizer: Any) -> None:
    del model[2]


def train_another_parameter(model: Any, optimizer: Any) -> None:
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})


@pytest.mark.parametrize(
    "change",
    [
        replace_module,
        replace_module_and_its_place_in_the_optimizer,
        replace_module_by_a_plain_one,
        add_parameter,
        remove_module,
        train_another_parameter,
    ],
)
def test_parameters_changed_after_the_state_was_made_are_refused_by_the_next_commit(four, change):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = TorchState(model=model, optimizer=optimizer, step=0)
    state.commit()
    change(model, optimizer)
    with pytest.raises(NotElastic) as refused:
        state.commit()
    assert refused.value.kind is Fixed.PARAMETERS


def test_unsharded_parameters_of_a_forward_pass_are_accepted_at_a_commit(four):
    model = network()
    state = TorchState(model=model)
    model.unshard()
    state.commit()


def test_optimizer_outside_of_the_state_is_refused_before_its_first_update(four):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sharding_guard.begin(TorchState(model=model, optimizer=optimizer).handled())
    sharding_guard.check(optimizer, 2, 4)
    with pytest.raises(NotElastic) as refused:
        sharding_guard.check(torch.optim.SGD(model.parameters(), lr=0.1), 2, 4)
    assert refused.value.kind is Fixed.OPTIMIZER


def test_dtensor_within_a_value_is_refused_at_creation_and_at_a_commit(four):
    model = network()
    optimizer = torch.optim.SGD(model.parameters())
    rows: Any = model[0].weight.detach()
    with pytest.raises(NotElastic):
        TorchState(model=model, optimizer=optimizer, best={"weights": [rows]})
    state = TorchState(model=model, optimizer=optimizer, best={})
    state.best["weights"] = rows
    with pytest.raises(NotElastic) as refused:
        state.commit()
    assert refused.value.kind is Fixed.PARAMETERS
    state.best["weights"] = rows.to_local()
    state.commit()


def test_parameters_offloaded_by_torch_stay_in_host_memory_over_another_mesh(four):
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    class Other(CPUOffloadPolicy):
        pass

    model: Any = fully_shard(nn.Linear(5, 7), offload_policy=Other(pin_memory=False))
    with pytest.raises(NotElastic) as refused:
        TorchState(model=model)
    assert refused.value.kind is Fixed.MODULE
    model = fully_shard(nn.Linear(5, 7), offload_policy=CPUOffloadPolicy(pin_memory=False))
    assert TorchState(model=model).is_sharded()
    for param in fsdp2.sharded_params(model).values():
        param.device = torch.device("meta")  # where it is gathered: a GPU
    fsdp2.remesh(model, fsdp2.make_hybrid_mesh(fsdp2.mesh_of(model), (0, 1, 2, 3), 2))
    assert all(each._local_tensor.device.type == "cpu" for each in model.parameters())


def test_sharded_value_cannot_replace_an_attribute_of_a_state(four):
    state = TorchState(model=nn.Linear(5, 7), step=0)
    with pytest.raises(NotElastic):
        state.model = network()
    model = network()
    state = TorchState(model=model, step=0)
    with pytest.raises(NotElastic):
        state.model = network()
    with pytest.raises(NotElastic):
        state.model = nn.Linear(5, 7)
    state.model = model
    assert state.is_sharded()


def test_results_of_operators_have_the_mesh_of_the_present_world(four):
    model = network()
    model[0].weight.detach()
    mesh = distributed.device_mesh.init_device_mesh("cpu", (4,))
    assert mesh == fsdp2.mesh_of(model)
    fsdp2.remesh(model, mesh)
    assert model[0].weight.detach().device_mesh is mesh


@pytest.mark.parametrize("commits", [1, 2, 3])
def test_restore_sets_exactly_the_committed_bits_in_a_single_worker_world(four, commits: int):
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    state = TorchState(model=model, optimizer=optimizer, step=0)
    ids = [id(each) for each in model.parameters()]
    fresh = bits(model, optimizer)
    give_gradients(model)
    optimizer.step()
    state.step = 1
    state.restore()  # to the state as it was made, without entries
    assert state.step == 0
    assert equal(bits(model, optimizer), fresh)
    for number in range(commits):
        give_gradients(model)
        optimizer.step()
        model[1].running_mean += 1
        state.step = number + 1
        state.commit()
    kept = bits(model, optimizer)
    give_gradients(model)
    optimizer.step()
    state.step = 99
    state.restore()
    assert state.step == commits
    assert equal(bits(model, optimizer), kept)
    assert ids == [id(each) for each in model.parameters()]
    assert all(each.grad is None for each in model.parameters())


def test_layout_of_a_sharded_state_differs_from_a_plain_one(four):
    model = network()
    plain = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 1))
    found = TorchState(model=model).layout().splitlines()
    others = TorchState(model=plain).layout().splitlines()
    assert [line for line in found if line not in others] and {*others} <= {*found}


def held_bits(held: Any) -> list[torch.Tensor]:
    return [each.rows.clone() for part in held.parts.values() for each in part.sharded.values()] + [
        each.clone() for part in held.parts.values() for each in part.tensors.values()
    ]


def test_held_commit_is_unchanged_by_later_commits(four):
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    state = TorchState(model=model, optimizer=optimizer, step=0)

    def commit() -> None:
        give_gradients(model)
        optimizer.step()
        model[1].running_mean += 1
        state.step += 1
        state.commit()

    commit()
    commit()
    memory = set()
    for _ in range(3):  # the memory of a commit that was held is used again
        held = hold(state)
        rows = {key: each for key, each in held.parts["model"].sharded.items() if len(each.rows)}
        mine = dict(model.named_parameters())
        assert all(torch.equal(each.rows, mine[key]._local_tensor) for key, each in rows.items())
        assert {(key, each.begin) for key, each in rows.items() if key == "0.weight"} == {
            ("0.weight", 2)
        }
        assert held.is_sharded and held.values["step"] == state.step
        before, step = held_bits(held), state.step
        for _ in range(5):
            commit()
            memory |= {each._own.data_ptr() for each in sharded_banks(state)}
            assert equal(held_bits(held), before) and held.values["step"] == step
        held.release()
    assert len(memory) == 3, "one shard more than without checkpoints"


def sharded_banks(state: TorchState) -> tuple[ShardBuffers, ...]:
    sharded = shards_of(state)
    assert sharded is not None
    return sharded._banks


def test_remeshing_keeps_parameter_objects_and_sets_the_rows_of_their_shard(four):
    model = network()
    before = {name: id(each) for name, each in model.named_parameters()}
    mesh = distributed.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))["b"]
    locals_ = fsdp2.remesh(model, mesh)
    assert {name: id(each) for name, each in model.named_parameters()} == before
    for name, each in model.named_parameters():
        assert each.device_mesh is mesh
        assert each._local_tensor is locals_[name]
        rows = len(torch.empty(each.shape[0]).chunk(2)[1:][0]) if each.shape[0] > 1 else 0
        assert locals_[name].shape == (rows, *each.shape[1:])


def test_remeshing_a_model_propagates_no_sharding(four):
    from torch.distributed.tensor import DTensor

    model, dispatcher = network(), DTensor._op_dispatcher.sharding_propagator
    with patch.object(
        dispatcher,
        "propagate_op_sharding_non_cached",
        wraps=dispatcher.propagate_op_sharding_non_cached,
    ) as propagate:
        fsdp2.remesh(model, distributed.device_mesh.init_device_mesh("cpu", (4,)))
        assert not propagate.called
        model[0].weight.detach()
        assert propagate.called


def test_mesh_of_another_size_generation_or_order_is_not_over_all_ranks(four):
    model = network()
    assert fsdp2.is_over_all(model, 4, 1)
    assert not fsdp2.is_over_all(model, 4, 2)
    assert not fsdp2.is_over_all(model, 3, 1)
    mesh = distributed.device_mesh.DeviceMesh("cpu", torch.tensor([2, 1, 3, 0]))
    fsdp2.remesh(model, mesh)
    assert not fsdp2.is_over_all(model, 4, 1), "in another order"


def test_unsupported_options_and_entries_of_a_sharded_state_are_refused(four):
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    for more in ({"shards": Shards(4)}, {"copies": -1}, {"copies": "two"}):
        with pytest.raises(Invalid):
            TorchState(model=model, optimizer=optimizer, **more)
    state = TorchState(model=model, optimizer=optimizer)
    first = next(model.parameters())
    optimizer.state[first]["statistics"] = torch.zeros(3)  # of whom?
    with pytest.raises(Invalid):
        state.commit()


def test_rows_within_a_list_of_an_optimizer_when_committed_then_refused(four):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    state = TorchState(model=model, optimizer=optimizer)
    first: Any = next(model.parameters())
    optimizer.state[first]["steps"] = [1, torch.tensor(2.0)]
    state.commit()
    optimizer.state[first]["history"] = [first._local_tensor.clone()]
    with pytest.raises(Invalid):
        state.commit()


def test_copies_is_an_ordinary_value_of_a_plain_state():
    state = TorchState(model=nn.Linear(2, 2), copies=5)
    assert state.copies == 5
    assert not state.is_sharded()


# ---- banks ---------------------------------------------------------------------------------------


def shards(rows: int) -> dict[str, LiveShard]:
    weight, bias = torch.randn(rows, 3), torch.randn(rows, dtype=torch.float64)
    return {
        "m/weight": LiveShard(weight, RowSpec((8, 3), torch.float32)),
        "m/bias": LiveShard(bias, RowSpec((8,), torch.float64)),
    }


def test_buffer_returns_the_copied_rows():
    bank, live = ShardBuffers(), shards(2)
    bank.arrange(live, 4, (2, 0))
    bank.copy(live, CommitId(3, 1))
    for name, (_, rows) in bank.own_rows().items():
        assert torch.equal(rows, live[name].local)
    found = bank.rows(ReshardingMove(0, 2, Rows(5, 6), 0, 1))
    assert torch.equal(found.view(torch.float32), live["m/weight"].local[1])
    assert len(bank.buffer(0)) == bank.layout.nbytes(0)


def test_header_names_the_complete_commit_until_the_next_begins():
    bank, live = ShardBuffers(), shards(2)
    bank.arrange(live, 4, (2,))
    offset, size = bank.where()
    memory = bank._own
    assert size == len(memory)
    assert not peer_arena.is_whole(memory, CommitId(3, 1), 2)
    bank.copy(live, CommitId(3, 1))
    assert peer_arena.is_whole(memory, CommitId(3, 1), 2)
    for other in ((CommitId(3, 2), 2), (CommitId(2, 1), 2), (CommitId(3, 1), 1)):
        assert not peer_arena.is_whole(memory, *other)
    bank.arrange(live, 4, (2,))
    assert not peer_arena.is_whole(memory, CommitId(3, 1), 2)
    assert bank.where() == (offset, size), "the memory is used again"


def test_buffer_returns_the_copied_rows_after_the_tensors_have_another_order():
    bank, live = ShardBuffers(), shards(2)
    for each in (live, dict(reversed(live.items()))):
        bank.arrange(each, 4, (2, 0))
        bank.copy(each, CommitId(3, 1))
        rows = bank.own_rows()
        assert list(rows) == list(each)
        assert all(torch.equal(found, live[name].local) for name, (_, found) in rows.items())
        first = next(iter(each.values())).local
        found = bank.rows(ReshardingMove(0, 2, Rows(5, 6), 0, 1))
        assert torch.equal(found.view(first.dtype).view(-1), first[1].reshape(-1))


def test_memory_of_a_bank_is_kept_when_its_state_is_dropped():
    """Others of the host read it after this process has left."""
    bank, live = ShardBuffers(), shards(2)
    bank.arrange(live, 4, (2,))
    bank.copy(live, CommitId(3, 1))
    mine = arena.mine()
    if mine is None:
        pytest.skip("no memory to share on this machine")
    before = mine.lent
    del bank
    assert mine.lent == before


def wide(rows: int) -> dict[str, LiveShard]:
    return {"m/weight": LiveShard(torch.randn(rows, 256), RowSpec((12, 256), torch.float32))}


def test_memory_of_a_bank_grows_in_place_when_a_shard_grows():
    bank = ShardBuffers()
    bank.arrange(wide(3), 4, (2,))
    before, small = bank.where()
    bank.buffer(2).fill_(7)
    live = wide(4)
    bank.arrange(live, 3, (1,))
    after, large = bank.where()
    assert (after, large - small) == (before, 1024)
    assert bank.buffer(1)[0] == 7, "its pages stay allocated"
    bank.copy(live, CommitId(4, 0))
    assert peer_arena.is_whole(bank._own, CommitId(4, 0), 1)
    assert torch.equal(bank.own_rows()["m/weight"][1], live["m/weight"].local)


def test_memory_held_for_a_checkpoint_is_unchanged_when_the_shard_grows():
    bank, live = ShardBuffers(), wide(3)
    bank.arrange(live, 4, (2,))
    bank.copy(live, CommitId(3, 1))
    release = bank.hold()
    held = bank._own
    bank.arrange(wide(4), 3, (1,))
    bank.copy(wide(4), CommitId(4, 0))
    assert bank._own.data_ptr() != held.data_ptr()
    assert peer_arena.is_whole(held, CommitId(3, 1), 2)
    release()


@pytest.mark.parametrize("size", [1000, 1500, 500])
def test_memory_is_resized_within_the_reserved_space(size):
    memory = peer_arena.allocate(1000, -1)
    found = peer_arena.resized(memory, size)
    if size == 500:
        assert found is None, "at least half of the memory is used"
    else:
        assert found is not None
        assert (found.data_ptr(), len(found)) == (memory.data_ptr(), size)


def test_memory_is_not_resized_beyond_the_reserved_space():
    assert peer_arena.resized(peer_arena.allocate(1000, -1), 1501) is None


# ---- replicas ------------------------------------------------------------------------------------


def two_by_two() -> Any:
    return distributed.device_mesh.init_device_mesh(
        "cpu", (2, 2), mesh_dim_names=("replicate", "shard")
    )


def hybrid() -> Any:
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 1))
    return fully_shard(model, mesh=two_by_two())


@pytest.mark.parametrize(
    ("order", "shards"),
    [((0, 1, 2, 3), 2), ((2, 0, 3, 1), 2), ((3, 1, 0, 2), 4), ((2, 1, 0, 3), 1)],
)
def test_a_mesh_of_replicas_leaves_parameters_the_same_objects(four, order, shards: int):
    model = network()
    before = {name: id(each) for name, each in model.named_parameters()}
    mesh = fsdp2.make_hybrid_mesh(fsdp2.mesh_of(model), order, shards)
    assert mesh.mesh.tolist() == [
        list(order[first : first + shards]) for first in range(0, 4, shards)
    ]
    shard = order.index(1) % shards
    assert fsdp2.shards_of(mesh) == (shards, shard)
    locals_ = fsdp2.remesh(model, mesh)
    assert {name: id(each) for name, each in model.named_parameters()} == before
    for name, each in model.named_parameters():
        assert each._local_tensor is locals_[name]
        assert fsdp2.by_rows(each)
        chunks = torch.empty(each.shape[0]).chunk(shards)
        assert len(locals_[name]) == (len(chunks[shard]) if shard < len(chunks) else 0)
    info = fsdp2.sharded_params(model)["0.weight"].mesh_info
    assert info.shard_process_group.rank() == shard
    assert info.replicate_process_group.size() == 4 // shards


def test_least_shards_defaults_to_the_mesh_and_must_not_exceed_the_minimum_of_workers(
    four, monkeypatch
):
    models = {"model": hybrid()}
    assert unsupported_sharding.least_shards(models, None) == 2
    assert unsupported_sharding.least_shards(models, 1) == 1
    assert unsupported_sharding.least_shards({"model": network()}, None) is None
    assert unsupported_sharding.least_shards({"model": network()}, 2) == 2
    for wrong in (0, -1, True, "two", 2.0):
        with pytest.raises(Invalid):
            unsupported_sharding.least_shards(models, wrong)
    with pytest.raises(NotElastic) as refused:
        unsupported_sharding.least_shards({"one": hybrid(), "other": network()}, 2)
    assert refused.value.kind is Fixed.MODULE
    job = SimpleNamespace(elastic=True, env=SimpleNamespace(workers_min=1))
    monkeypatch.setattr(lifecycle, "active", lambda: job)
    assert unsupported_sharding.least_shards(models, 1) == 1
    for given in (None, 2):
        with pytest.raises(Invalid):
            unsupported_sharding.least_shards(models, given)


def test_workers_of_a_world_compare_copies_and_least_shards_as_given_but_no_checkpoint_does(four):
    model = network()
    one, other, few = (
        TorchState(model=model, copies=copies, least_shards=least)
        for copies, least in ((1, None), (2, None), (1, 2))
    )
    assert one.layout() == other.layout() == few.layout()
    assert len({tuple(options_of(each)) for each in (one, other, few)}) == 3
    # A worker that joins makes its mesh for another number of workers.
    assert options_of(TorchState(model=hybrid())) == options_of(one)
    assert options_of(TorchState(model=nn.Linear(2, 2), copies=3)) == []


def test_a_state_with_replicas_restores_exactly_the_committed_bits(four):
    model = hybrid()
    optimizer = torch.optim.AdamW(model.parameters())
    state = TorchState(model=model, optimizer=optimizer)
    give_gradients(model)
    optimizer.step()
    state.commit()
    kept = bits(model, optimizer)
    give_gradients(model)
    optimizer.step()
    state.restore()
    assert equal(bits(model, optimizer), kept)


def test_least_shards_is_an_ordinary_value_of_a_plain_state():
    state = TorchState(model=nn.Linear(2, 2), least_shards=5)
    assert state.least_shards == 5


def test_groups_of_a_hybrid_mesh_are_followed(four):
    sharding_guard.begin(TorchState(model=hybrid()).handled())
    found = unsupported_sharding.followed_groups()
    assert all(found.count(line) for line in [(0, 1), (2, 3), (0, 2), (1, 3)])


def test_digest_differs_for_shards_with_different_values():
    found = set()
    for more in (0, 0, 1):
        bank, live = ShardBuffers(), shards(2)
        for each in live.values():
            each.local.fill_(1)
        live["m/bias"].local[1] += more
        bank.arrange(live, 4, (2,))
        bank.copy(live, CommitId(3, 1))
        found.add(bank.digest())
    assert len(found) == 2


def committed_rows(state: Any) -> dict[str, torch.Tensor]:
    bank = state._sharded.base()
    return {name: rows.clone() for name, (_, rows) in bank.own_rows().items()}


def committed_adamw() -> tuple[TorchState, torch.optim.AdamW]:
    """Return a state after one step, and its optimizer."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    state = TorchState(model=model, optimizer=optimizer)
    give_gradients(model)
    optimizer.step()
    state.save()
    return state, optimizer


def test_commit_contains_replaced_optimizer_entries(four):
    state, optimizer = committed_adamw()
    for entries in optimizer.state.values():
        entries["exp_avg"] = torch.full_like(entries["exp_avg"], 5.0)
    state.save()
    found = committed_rows(state)
    averages = [rows for name, rows in found.items() if name.endswith("exp_avg")]
    assert averages and all((rows == 5.0).all() for rows in averages)


def test_entry_with_a_changed_shape_is_refused_by_the_next_commit(four):
    state, optimizer = committed_adamw()
    next(iter(optimizer.state.values()))["exp_avg"] = torch.ones(17)
    with pytest.raises(Invalid):
        state.save()
