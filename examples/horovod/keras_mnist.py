"""Classify handwritten digits with Keras `fit` and Horovod's callbacks (scikit-learn's 1,797 images of 8 x 8).

horovodrun -np 2 python examples/horovod/keras_mnist.py
"""

import argparse

import keras
from sklearn.datasets import load_digits

import horovod.keras as hvd

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("--epochs", type=int, default=12)
args = parser.parse_args()

hvd.init()
images, labels = load_digits(return_X_y=True)
images = images.reshape(-1, 8, 8, 1).astype("float32") / 16
train_images, test_images = images[:1440], images[1440:]
train_labels, test_labels = labels[:1440], labels[1440:]

model = keras.Sequential(
    [
        keras.layers.Conv2D(16, kernel_size=(3, 3), activation="relu"),
        keras.layers.MaxPooling2D(pool_size=(2, 2)),
        keras.layers.Flatten(),
        keras.layers.Dropout(0.2),
        keras.layers.Dense(64, activation="relu"),
        keras.layers.Dense(10, activation="softmax"),
    ]
)

# Horovod: the learning rate grows with the number of workers.
scaled_lr = 0.002 * hvd.size()
optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(learning_rate=scaled_lr))
model.compile(loss="sparse_categorical_crossentropy", optimizer=optimizer, metrics=["accuracy"])

callbacks = [
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    hvd.callbacks.MetricAverageCallback(),
    hvd.callbacks.LearningRateWarmupCallback(initial_lr=scaled_lr, warmup_epochs=3, verbose=1),
]
if hvd.rank() == 0:
    callbacks.append(keras.callbacks.ModelCheckpoint("./checkpoint-{epoch}.keras"))

model.fit(
    train_images[hvd.rank() :: hvd.size()],
    train_labels[hvd.rank() :: hvd.size()],
    batch_size=32,
    callbacks=callbacks,
    epochs=args.epochs,
    verbose=2 if hvd.rank() == 0 else 0,
)
score = hvd.allreduce(model.evaluate(test_images, test_labels, verbose=0)[1])
if hvd.rank() == 0:
    print(f"Test accuracy: {score:.4f}")
