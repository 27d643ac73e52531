"""Train a network with Horovod's elastic API while workers join and leave.

    horovodrun -np 3 --min-np 1 python horovod_elastic.py --epochs 5

The state is committed every 100 batches, and host changes are checked every 10 batches. The learning rate is
proportional to the number of workers.
"""

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

import horovod.torch as hvd

parser = argparse.ArgumentParser(description="Horovod: elastic training")
parser.add_argument("--batch-size", type=int, default=4)
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--lr", type=float, default=0.005)
parser.add_argument("--batches-per-commit", type=int, default=100)
parser.add_argument("--batches-per-host-check", type=int, default=10)
parser.add_argument("--log-interval", type=int, default=50)
args = parser.parse_args()

hvd.init()
torch.manual_seed(42)
torch.set_num_threads(1)
cuda = torch.cuda.is_available()
if cuda:
    torch.cuda.set_device(hvd.local_rank())

images, labels = load_digits(return_X_y=True)
images = torch.tensor(images, dtype=torch.float32) / 16
labels = torch.tensor(labels)
train_dataset = TensorDataset(images[:1500], labels[:1500])
test_images, test_labels = images[1500:], labels[1500:]

model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
if cuda:
    model.cuda()
    test_images, test_labels = test_images.cuda(), test_labels.cuda()
optimizer = optim.SGD(model.parameters(), lr=args.lr * hvd.size(), momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

train_sampler = hvd.elastic.ElasticSampler(train_dataset, shuffle=True, seed=1)
train_loader = DataLoader(train_dataset, batch_size=args.batch_size, sampler=train_sampler)


def train_one_epoch(state):
    model.train()
    batch_offset = state.batch
    for batch_idx, (data, target) in enumerate(train_loader):
        state.batch = batch_idx + batch_offset
        if state.batch % args.batches_per_commit == 0:
            state.commit()
        elif state.batch % args.batches_per_host_check == 0:
            state.check_host_updates()
        if cuda:
            data, target = data.cuda(), target.cuda()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(data), target)
        loss.backward()
        optimizer.step()
        train_sampler.record_batch(batch_idx, args.batch_size)
        if state.batch % args.log_interval == 0 and hvd.rank() == 0:
            print(
                f"epoch {state.epoch} batch {state.batch} size {hvd.size()} loss {loss.item():.4f}",
                flush=True,
            )


def end_epoch(state):
    state.epoch += 1
    state.batch = 0
    train_sampler.set_epoch(state.epoch)
    state.commit()


@hvd.elastic.run
def train(state):
    while state.epoch < args.epochs:
        train_one_epoch(state)
        end_epoch(state)


def on_state_reset():
    for param_group in optimizer.param_groups:
        param_group["lr"] = args.lr * hvd.size()


state = hvd.elastic.TorchState(model, optimizer, train_sampler=train_sampler, epoch=0, batch=0)
state.register_reset_callbacks([on_state_reset])
train(state)

model.eval()
with torch.no_grad():
    accuracy = (model(test_images).argmax(1) == test_labels).float().mean()
accuracy = hvd.allreduce(accuracy.cpu(), name="accuracy").item()
if hvd.rank() == 0:
    lr = optimizer.param_groups[0]["lr"]
    print(f"done: epochs {state.epoch}, size {hvd.size()}, lr {lr:.4f}, accuracy {accuracy:.3f}")
