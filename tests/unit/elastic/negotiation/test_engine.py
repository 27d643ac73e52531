"""The end of an engine; earlier behaviour is tested by named collectives on real ranks."""

import weakref

import torch

from elastic.collectives.single_rank import LocalCollectives
from elastic.negotiation.engine import Engine
from elastic.negotiation.pending import Pending
from elastic.protocol.messages import Address, Place
from elastic.rendezvous import worker_settings
from elastic.rendezvous.store import Store


def test_pending_requests_are_released_when_the_engine_closes():
    engine = Engine(
        generation=1,
        place=Place(rank=1, size=2, local_rank=1, local_size=2, cross_rank=0, cross_size=1),
        store=Store(Address("127.0.0.1", 1), None, timeout_s=1.0),
        env=worker_settings.read({}),
        group_for=lambda purpose, device, members: LocalCollectives(),
        broken=lambda reason: None,
    )
    tensor = torch.zeros(3)
    gone = weakref.ref(tensor)
    engine.submit(Pending("allreduce", "allreduce.a", (), [tensor], tensor.device, op=1), soon=True)
    del tensor
    assert gone() is not None  # nobody has driven yet
    engine.close()
    assert gone() is None
