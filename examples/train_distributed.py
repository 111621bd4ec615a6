"""Train on several processes with statistics over the whole batch.

    pip install iternorm scikit-learn
    torchrun --nproc-per-node 2 examples/train_distributed.py

Runs on GPUs (nccl) where each process has one, else on the CPU (gloo). Each process takes its share of every batch;
SyncIterNorm whitens with the statistics of all shares together, DistributedDataParallel averages the gradients.
"""

import argparse
import os
from typing import Any

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import iternorm


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 10),
    )


def train(model: nn.Module, images: torch.Tensor, labels: torch.Tensor, steps: int, batch: int) -> float:
    """Train in place on this process's share of every batch; the loss of the last share."""
    parallel = DistributedDataParallel(model, device_ids=[images.device.index] if images.is_cuda else None)
    optimizer = torch.optim.SGD(parallel.parameters(), 0.1, momentum=0.9)
    loss = torch.tensor(torch.nan)
    for _ in range(steps):
        share = torch.randint(len(images), (batch,)).tensor_split(dist.get_world_size())[dist.get_rank()]
        loss = cross_entropy(parallel(images[share]), labels[share])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=128, help="over all processes together")
    args = parser.parse_args()
    local = int(os.environ["LOCAL_RANK"])
    cuda = torch.cuda.device_count() > local
    device = torch.device("cuda", local) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")

    data: Any = load_digits()
    images = (torch.tensor(data.images, dtype=torch.float32)[:, None] / 8 - 1).to(device)
    labels = torch.tensor(data.target, device=device)
    # The same seed everywhere: the same weights, and the same batches to take a share of.
    torch.manual_seed(0)
    model = iternorm.convert_sync_iternorm(iternorm.convert_batchnorm(network(), group_size=32)).to(device)
    loss = train(model, images[:1400], labels[:1400], args.steps, args.batch)
    model.eval()
    with torch.no_grad():
        accuracy = (model(images[1400:]).argmax(1) == labels[1400:]).float().mean().item()
    # Every process has seen the statistics of the whole batch, so their running averages are one.
    statistics = torch.cat([b.double().flatten() for b in model.buffers()])
    gathered = [torch.empty_like(statistics) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, statistics)
    if dist.get_rank() == 0:
        same = all(torch.equal(other, statistics) for other in gathered)
        print(f"{len(gathered)} processes, {args.steps} steps: loss {loss:.3f}, test accuracy {accuracy:.3f}")
        print(f"running statistics alike on all processes: {same}")
    # gloo may wait for ever if it is taken down right after a collective that holds tensors.
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
