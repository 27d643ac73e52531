"""Train a small residual network on generated images of ten kinds, with the techniques of large-batch training.

    horovodrun -np 4 python horovod_imagenet.py --batches-per-allreduce 2 --fp16-allreduce

The script uses learning-rate warmup, gradient accumulation, compression, averaged metrics, and checkpoints written by
rank 0. After a restart, it resumes from the last checkpoint that rank 0 finds.
"""

import argparse
import math
import os

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

import horovod.torch as hvd

parser = argparse.ArgumentParser(description="Horovod: residual network")
parser.add_argument("--checkpoint-format", default="./checkpoint-{epoch}.pth.tar")
parser.add_argument("--fp16-allreduce", action="store_true")
parser.add_argument("--batches-per-allreduce", type=int, default=1)
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--val-batch-size", type=int, default=32)
parser.add_argument("--epochs", type=int, default=6)
parser.add_argument("--images", type=int, default=1024)
parser.add_argument("--base-lr", type=float, default=0.0125, help="of one worker")
parser.add_argument("--warmup-epochs", type=float, default=2)
parser.add_argument("--momentum", type=float, default=0.9)
parser.add_argument("--wd", type=float, default=5e-5)
parser.add_argument("--seed", type=int, default=42)
args = parser.parse_args()
allreduce_batch_size = args.batch_size * args.batches_per_allreduce

hvd.init()
torch.manual_seed(args.seed)
torch.set_num_threads(1)
cuda = torch.cuda.is_available()
if cuda:
    torch.cuda.set_device(hvd.local_rank())
verbose = hvd.rank() == 0


class Generated(Dataset):
    """Ten patterns of stripes in noise."""

    def __init__(self, count, seed):
        self.count, self.seed = count, seed

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        label = index % 10
        generator = torch.Generator().manual_seed(self.seed + index)
        steps = torch.linspace(0, 3, 16)
        angle = math.pi * label / 10
        waves = torch.sin(4 * (math.cos(angle) * steps[:, None] + math.sin(angle) * steps))
        return waves + 0.3 * torch.randn(3, 16, 16, generator=generator), label


class Block(nn.Module):
    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x):
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class Metric:
    """A mean over all workers and all batches so far."""

    def __init__(self, name):
        self.name = name
        self.sum = torch.tensor(0.0)
        self.n = torch.tensor(0.0)

    def update(self, value):
        self.sum += hvd.allreduce(value.detach().cpu(), name=self.name)
        self.n += 1

    @property
    def avg(self):
        return self.sum / self.n


# Rank 0 finds the last checkpoint, from which all ranks resume.
resume_from_epoch = 0
for try_epoch in range(args.epochs, 0, -1):
    if os.path.exists(args.checkpoint_format.format(epoch=try_epoch)):
        resume_from_epoch = try_epoch
        break
resume_from_epoch = hvd.broadcast(
    torch.tensor(resume_from_epoch), root_rank=0, name="resume_from_epoch"
).item()

train_dataset, val_dataset = Generated(args.images, 0), Generated(args.images // 4, 10**6)
train_sampler = DistributedSampler(train_dataset, num_replicas=hvd.size(), rank=hvd.rank())
train_loader = DataLoader(train_dataset, batch_size=allreduce_batch_size, sampler=train_sampler)
val_sampler = DistributedSampler(val_dataset, num_replicas=hvd.size(), rank=hvd.rank())
val_loader = DataLoader(val_dataset, batch_size=args.val_batch_size, sampler=val_sampler)

model = nn.Sequential(
    Block(3, 8, 1), Block(8, 16, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10)
)
if cuda:
    model.cuda()
lr_scaler = args.batches_per_allreduce * hvd.size()
optimizer = torch.optim.SGD(
    model.parameters(), lr=args.base_lr * lr_scaler, momentum=args.momentum, weight_decay=args.wd
)
compression = hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none
optimizer = hvd.DistributedOptimizer(
    optimizer,
    named_parameters=model.named_parameters(),
    compression=compression,
    backward_passes_per_step=args.batches_per_allreduce,
    op=hvd.Average,
)

# Only rank 0 reads the file. Other ranks receive the content.
if resume_from_epoch > 0 and hvd.rank() == 0:
    checkpoint = torch.load(args.checkpoint_format.format(epoch=resume_from_epoch))
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)


def adjust_learning_rate(epoch, batch_idx):
    """Raise the rate from that of one worker to that of all, then lower it in steps."""
    if epoch < args.warmup_epochs:
        epoch += float(batch_idx + 1) / len(train_loader)
        factor = 1.0 / hvd.size() * (epoch * (hvd.size() - 1) / args.warmup_epochs + 1)
    elif epoch < args.epochs * 0.8:
        factor = 1.0
    else:
        factor = 0.1
    for param_group in optimizer.param_groups:
        param_group["lr"] = args.base_lr * hvd.size() * args.batches_per_allreduce * factor


def accuracy(output, target):
    return (output.argmax(1) == target).float().mean()


def train(epoch):
    model.train()
    train_sampler.set_epoch(epoch)
    train_loss, train_accuracy = Metric("train_loss"), Metric("train_accuracy")
    for batch_idx, (data, target) in enumerate(train_loader):
        adjust_learning_rate(epoch, batch_idx)
        if cuda:
            data, target = data.cuda(), target.cuda()
        optimizer.zero_grad()
        # Computed in parts, since a batch of this size may not fit into memory.
        pieces = list(range(0, len(data), args.batch_size))
        for i in pieces:
            data_batch = data[i : i + args.batch_size]
            target_batch = target[i : i + args.batch_size]
            output = model(data_batch)
            train_accuracy.update(accuracy(output, target_batch))
            loss = F.cross_entropy(output, target_batch)
            train_loss.update(loss)
            loss.div_(math.ceil(float(len(data)) / args.batch_size))
            loss.backward()
        optimizer.step()
    if verbose:
        lr = optimizer.param_groups[0]["lr"]
        print(
            f"Train Epoch #{epoch + 1}: loss {train_loss.avg:.4f} accuracy {100 * train_accuracy.avg:.1f}% lr {lr:.5f}"
        )


def validate(epoch):
    model.eval()
    val_loss, val_accuracy = Metric("val_loss"), Metric("val_accuracy")
    with torch.no_grad():
        for data, target in val_loader:
            if cuda:
                data, target = data.cuda(), target.cuda()
            output = model(data)
            val_loss.update(F.cross_entropy(output, target))
            val_accuracy.update(accuracy(output, target))
    if verbose:
        print(
            f"Validate Epoch #{epoch + 1}: loss {val_loss.avg:.4f} accuracy {100 * val_accuracy.avg:.1f}%"
        )


def save_checkpoint(epoch):
    if hvd.rank() == 0:
        filepath = args.checkpoint_format.format(epoch=epoch + 1)
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, filepath)


if verbose:
    print(f"starting with epoch #{resume_from_epoch + 1}")
for epoch in range(resume_from_epoch, args.epochs):
    train(epoch)
    validate(epoch)
    save_checkpoint(epoch)
