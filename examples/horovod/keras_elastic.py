"""Classify handwritten digits with elastic Keras `fit`, on TensorFlow, torch or JAX.

    horovodrun -np 2 --min-np 1 -H localhost:2 python examples/horovod/keras_elastic.py
    KERAS_BACKEND=torch horovodrun -np 2 --min-np 1 -H localhost:2 python examples/horovod/keras_elastic.py

The data are scikit-learn's 1,797 images of 8 x 8. The samples of a step do not depend on the number of workers, so the
losses are the same even if workers are lost.
"""

import argparse
import time

import keras
import numpy as np
from sklearn.datasets import load_digits

import horovod.keras as hvd

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("--epochs", type=int, default=8)
parser.add_argument("--batch-size", type=int, default=64, help="of all workers together")
parser.add_argument("--pause", type=float, default=0.0, help="seconds that a step takes longer")
args = parser.parse_args()

hvd.init()
keras.utils.set_random_seed(1)
images, labels = load_digits(return_X_y=True)
images, labels = images.astype("float32") / 16, labels.astype("int32")


class Batches(keras.utils.PyDataset):
    """This worker's share of each batch. An epoch begins where the last world stopped."""

    first = 0

    def on_epoch_begin(self):
        self.first = state.batch

    def __len__(self):
        return len(images) // args.batch_size

    def __getitem__(self, index):
        time.sleep(args.pause)
        begin = (self.first + index) % len(self) * args.batch_size
        mine = np.arange(begin, begin + args.batch_size)[hvd.rank() :: hvd.size()]
        return images[mine], labels[mine]


model = keras.Sequential(
    [
        keras.Input((64,)),
        keras.layers.Dense(64, activation="relu"),
        keras.layers.Dense(10, activation="softmax"),
    ]
)
optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(learning_rate=0.002))
model.compile(loss="sparse_categorical_crossentropy", optimizer=optimizer)


class Report(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        self.first = state.batch

    def on_epoch_end(self, epoch, logs=None):
        if hvd.rank() == 0:
            loss = f"loss {logs['loss']:.6f} from batch {self.first}"
            print(f"epoch {state.epoch} of {hvd.size()} workers: {loss}", flush=True)


@hvd.elastic.run
def train(state):
    model.fit(
        Batches(),
        epochs=args.epochs - state.epoch,
        callbacks=[
            hvd.callbacks.MetricAverageCallback(),
            hvd.elastic.UpdateBatchStateCallback(state),
            hvd.elastic.UpdateEpochStateCallback(state),
            Report(),
            hvd.elastic.CommitStateCallback(state),  # must be last, since the world may change here
        ],
        shuffle=False,
        verbose=0,
    )


state = hvd.elastic.KerasState(model, batch=0, epoch=0)
train(state)
loss = model.evaluate(images, labels, verbose=0)
print(f"rank {hvd.rank()} ended after {state.epoch} epochs with loss {loss:.6f}")
