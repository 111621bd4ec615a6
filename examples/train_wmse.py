"""Train a self-supervised W-MSE head (Ermolov et al., ICML 2021) on CIFAR-10 with several processes.

    pip install 'iternorm[experiments]'
    torchrun --nproc-per-node 2 examples/train_wmse.py --steps 300

Each image is seen in two random views. The embeddings of a view are whitened over the batches of all processes together
and compared with those of the other view. Whitening keeps them from collapsing to one point, so there are no negative
pairs. Runs on GPUs (nccl) where each process has one, else on the CPU (gloo). Without CIFAR-10 in ITERNORM_DATA, or
with --generated, the images are generated ones of its shape.
"""

import argparse
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity, normalize, pad
from torch.nn.parallel import DistributedDataParallel

import iternorm
from iternorm.experiments.data.datasets import available, load
from iternorm.experiments.data.generated import look_alike

FEATURES, EMBEDDING = 128, 32


def network() -> nn.Sequential:
    def block(inputs: int, outputs: int) -> list[nn.Module]:
        return [nn.Conv2d(inputs, outputs, 3, 2, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]

    encoder = nn.Sequential(*block(3, 32), *block(32, 64), *block(64, FEATURES), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    head = nn.Sequential(
        nn.Linear(FEATURES, 256),
        nn.BatchNorm1d(256),
        nn.ReLU(),
        nn.Linear(256, EMBEDDING),
        # What W-MSE calls Whitening2d: Cholesky, the unbiased covariance, nothing added to it.
        iternorm.DecorrelatedBatchNorm1d(
            EMBEDDING,
            eps=0.0,
            affine=False,
            track_running_stats=False,
            group_size=None,
            solver="cholesky",
            correction=1,
        ),
    )
    return nn.Sequential(encoder, head)


def view(images: Tensor) -> Tensor:
    """A random crop, flip and change of colours of each image."""
    count, _, height, width = images.shape
    padded = pad(images, (4, 4, 4, 4), mode="reflect")
    top, left = torch.randint(0, 9, (2, count, 1), device=images.device)
    rows = top + torch.arange(height, device=images.device)
    columns = left + torch.arange(width, device=images.device)
    index = torch.arange(count, device=images.device)[:, None, None]
    crops = padded[index, :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)
    flipped = torch.rand(count, 1, 1, 1, device=images.device) < 0.5
    crops = torch.where(flipped, crops.flip(3), crops)
    scale, shift = torch.empty(2, count, 3, 1, 1, device=images.device).uniform_(-0.4, 0.4)
    return crops * (1 + scale) + shift


def train(model: nn.Module, images: Tensor, steps: int, batch: int) -> list[float]:
    """Train in place on this process's share of every batch; the losses of its shares."""
    parallel = DistributedDataParallel(model, device_ids=[images.device.index] if images.is_cuda else None)
    optimizer = torch.optim.Adam(parallel.parameters(), 2e-3, weight_decay=1e-6)
    generator = torch.Generator().manual_seed(0)
    losses = []
    for _ in range(steps):
        # The same batch on every process, to take a share of; the views are each process's own.
        chosen = torch.randint(len(images), (batch,), generator=generator)
        share = images[chosen.tensor_split(dist.get_world_size())[dist.get_rank()].to(images.device)]
        # One call a view: each is whitened by its own statistics.
        first, second = parallel(view(share)), parallel(view(share))
        loss = 2 - 2 * cosine_similarity(first, second).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@torch.no_grad()
def neighbour_accuracy(encoder: nn.Module, train_set: tuple[Tensor, Tensor], test_set: tuple[Tensor, Tensor]) -> float:
    """How often the most similar training image has the label of a test image."""
    encoder.eval()
    sets = (train_set[0], test_set[0])
    known, asked = (torch.cat([normalize(encoder(x)) for x in images.split(500)]) for images in sets)
    nearest = (asked @ known.T).argmax(1)
    encoder.train()
    return (train_set[1][nearest] == test_set[1]).float().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=256, help="over all processes together")
    parser.add_argument("--generated", action="store_true", help="generated images, whatever data there are")
    args = parser.parse_args()
    local = int(os.environ["LOCAL_RANK"])
    cuda = torch.cuda.device_count() > local
    device = torch.device("cuda", local) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")

    generated = args.generated or not available("cifar10")
    sets = [look_alike("cifar10", s) if generated else load("cifar10", s) for s in ("train", "test")]
    (images, labels), (test_images, test_labels) = (((x.float() / 127.5 - 1).to(device), y.to(device)) for x, y in sets)
    known, asked = (images[:2000], labels[:2000]), (test_images[:500], test_labels[:500])
    # The same seed everywhere for the weights, another one for the views.
    torch.manual_seed(0)
    model: Any = iternorm.convert_sync_iternorm(network(), batchnorm=cuda).to(device)
    torch.manual_seed(1 + dist.get_rank())
    before = neighbour_accuracy(model[0], known, asked)
    losses = train(model, images, args.steps, args.batch)
    after = neighbour_accuracy(model[0], known, asked)
    # Every process's share of the embeddings, whitened over all of them.
    with torch.no_grad():
        embeddings = model(images[dist.get_rank() * 128 :][:128])
    gathered = [torch.empty_like(embeddings) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, embeddings)
    if dist.get_rank() == 0:
        spectrum = torch.linalg.eigvalsh(torch.cat(gathered).T.double().cov())
        print(f"{len(gathered)} processes, {'generated images' if generated else 'CIFAR-10'}, {args.steps} steps")
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, nearest neighbours' accuracy {before:.3f} -> {after:.3f}")
        print(f"variances of the embeddings along their axes: {spectrum[0]:.4f} to {spectrum[-1]:.4f}")
    # gloo may wait for ever if it is taken down right after a collective that holds tensors.
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
