"""A real communicator of NCCL with one rank: what one GPU shows with any NCCL. ROUNDS times: connect, reduce, abort a
collective that is queued behind a busy stream, and see that it goes away.
"""

import gc
import os
import threading
import time

from elastic.rendezvous import worker_settings
from gpu.workers.notes import note

worker_settings.prepare(worker_settings.read())  # as init() does, before torch reads any of it

import torch  # noqa: E402

from elastic.collectives.interface import Op  # noqa: E402
from elastic.collectives.nccl import NcclCollectives  # noqa: E402
from elastic.errors import CollectiveFailed  # noqa: E402
from elastic.rendezvous.store import Store, listen  # noqa: E402

BUSY_CYCLES = 2_000_000_000  # about a second
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.uint8, torch.int64)

device = torch.device("cuda", 0)
torch.cuda.set_device(device)
for number in range(int(os.environ["ROUNDS"])):
    listener = listen("127.0.0.1")
    store = Store(listener.address, listener, 30.0, generation=number)
    store.open()
    began = time.monotonic()
    group = NcclCollectives(0, 1, 30.0)
    group.connect(store, "alone", "127.0.0.1")
    connected_s = time.monotonic() - began
    for dtype in DTYPES:
        for op in (Op.SUM, Op.MIN, Op.MAX, Op.PRODUCT):
            tensor = torch.full((1001,), 3, device=device).to(dtype)
            group.allreduce(tensor, op).wait()
            assert tensor.eq(3).all(), (dtype, op)
    group.broadcast(torch.ones(5, device=device), 0).wait()
    group.barrier().wait()
    torch.cuda._sleep(BUSY_CYCLES)
    work = group.allreduce(torch.ones(1000, device=device), Op.SUM)
    threading.Timer(0.1, group.abort).start()
    began = time.monotonic()
    raised_s = None
    try:
        work.wait()
    except CollectiveFailed:
        raised_s = time.monotonic() - began
    began = time.monotonic()
    drained = group.drain(20.0)
    drained_s = time.monotonic() - began
    group.close()
    store.close()
    del group, work
    gc.collect()
    free, total = torch.cuda.mem_get_info()
    note(
        "round",
        connected_ms=connected_s * 1e3,
        raised_after_abort_ms=None if raised_s is None else (raised_s - 0.1) * 1e3,
        drained=drained,
        drained_ms=drained_s * 1e3,
        used_mb=(total - free) / 1e6,
        threads=len(os.listdir("/proc/self/task")),
    )
