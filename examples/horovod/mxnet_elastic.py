"""Train with an elastic Gluon loop, whose workers may die and join.

elasticrun -np 2 --min-np 1 python mxnet_elastic.py
"""

import argparse
import time

import mxnet as mx
from mxnet import autograd, gluon

import horovod.mxnet as hvd

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=300)
parser.add_argument("--pause", type=float, default=0.0, help="seconds after each step")
args = parser.parse_args()

hvd.init()
net = gluon.nn.Dense(1, in_units=8)
net.initialize(mx.init.Normal(0.1))
trainer = hvd.DistributedTrainer(net.collect_params(), "sgd", {"learning_rate": 0.05})
loss_of = gluon.loss.L2Loss()


@hvd.elastic.run
def train(state):
    while state.step < args.steps:
        x = mx.nd.random.normal(shape=(16, 8))
        with autograd.record():
            loss = loss_of(state.net(x), x.sum(axis=1))
        loss.backward()
        state.trainer.step(16)
        if state.step % 20 == 0:
            print(f"step {state.step} of {hvd.size()} workers", flush=True)
        state.step += 1
        state.commit()
        time.sleep(args.pause)
    print(
        f"ended after {state.step} steps: {net.weight.data().asnumpy().tobytes().hex()}", flush=True
    )


train(hvd.elastic.MXNetState(net, trainer, step=0))
