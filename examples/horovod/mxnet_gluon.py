"""Classify points with a small Gluon network and Horovod.

horovodrun -np 2 python mxnet_gluon.py
"""

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon

import horovod.mxnet as hvd

hvd.init()
random = np.random.RandomState(7)
points = random.uniform(-1, 1, size=(2048, 2)).astype("float32")
labels = (np.hypot(points[:, 0], points[:, 1]) < 0.7).astype("float32")
mine = slice(hvd.rank(), None, hvd.size())
data = gluon.data.DataLoader(
    gluon.data.ArrayDataset(points[mine], labels[mine]), batch_size=32, shuffle=True
)

mx.random.seed(hvd.rank())
net = gluon.nn.HybridSequential()
net.add(gluon.nn.Dense(32, activation="relu"), gluon.nn.Dense(2))
net.initialize(mx.init.Xavier())
net.hybridize()
net(mx.nd.ones((1, 2)))
hvd.broadcast_parameters(net.collect_params(), root_rank=0)
trainer = hvd.DistributedTrainer(net.collect_params(), "adam", {"learning_rate": 0.01 * hvd.size()})
loss_of = gluon.loss.SoftmaxCrossEntropyLoss()

for epoch in range(8):
    total = 0.0
    for x, y in data:
        with autograd.record():
            loss = loss_of(net(x), y)
        loss.backward()
        trainer.step(len(x))
        total += float(loss.mean().asscalar())
    mean = hvd.allreduce(mx.nd.array([total / len(data)]), name="loss").asscalar()
    if hvd.rank() == 0:
        print(f"epoch {epoch}: loss {mean:.4f}", flush=True)

found = net(mx.nd.array(points[mine])).argmax(axis=1).asnumpy()
right = mx.nd.array([float((found == labels[mine]).mean())])
print(f"accuracy: {hvd.allreduce(right, name='accuracy').asscalar():.4f}", flush=True)
