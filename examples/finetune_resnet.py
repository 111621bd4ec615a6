"""Swap BatchNorm in a Hugging Face ResNet for IterNorm and fine-tune, the way the paper found best (IterNorm-L1 + DF).

    pip install 'iternorm[models]' scikit-learn
    python examples/finetune_resnet.py

A small ResNet is first trained with BatchNorm on handwritten digits; then its first norm becomes an IterNorm, another
one goes before its last linear layer, and training goes on. Put `ResNetForImageClassification.from_pretrained(...)` in
place of `pretrained` for a model of your own. About a minute on two CPU cores.
"""

import argparse
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy, interpolate
from transformers import ResNetConfig, ResNetForImageClassification

import iternorm


def digits() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Images ``[N, 3, 32, 32]`` and labels, to train and to test."""
    data: Any = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32)[:, None].expand(-1, 3, -1, -1) / 8 - 1
    images, labels = interpolate(images, size=32), torch.tensor(data.target)
    return images[:1400], labels[:1400], images[1400:], labels[1400:]


def train(model, images, labels, steps: int, lr: float) -> float:
    """The loss, averaged over the last ten steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr, momentum=0.9, weight_decay=1e-4)
    losses = []
    model.train()
    for _ in range(steps):
        batch = torch.randint(len(images), (64,))
        loss = cross_entropy(model(images[batch]).logits, labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return sum(losses[-10:]) / len(losses[-10:])


@torch.no_grad()
def accuracy(model, images, labels) -> float:
    model.eval()
    return (model(images).logits.argmax(1) == labels).float().mean().item()


def pretrained(images, labels, steps: int) -> ResNetForImageClassification:
    size: dict[str, Any] = {
        "embedding_size": 32,
        "hidden_sizes": [32, 64, 96, 128],
        "depths": [1, 1, 1, 1],
        "num_labels": 10,
    }
    model = ResNetForImageClassification(ResNetConfig(**size))
    train(model, images, labels, steps, lr=0.05)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100, help="of training before the swap, and again after it")
    steps = parser.parse_args().steps
    torch.manual_seed(0)
    images, labels, test_images, test_labels = digits()
    model = pretrained(images, labels, steps)
    print(f"BatchNorm, {steps} steps: test accuracy {accuracy(model, test_images, test_labels):.3f}")

    model = iternorm.convert_batchnorm(model, where="first")
    model = iternorm.decorrelate_features(model)
    print(f"after the swap, untrained: test accuracy {accuracy(model, test_images, test_labels):.3f}")

    loss = train(model, images, labels, steps, lr=0.02)
    print(f"fine-tuned {steps} steps: loss {loss:.3f}, test accuracy {accuracy(model, test_images, test_labels):.3f}")

    batches = images[torch.randperm(len(images))].split(200)
    iternorm.recalibrate(model, batches, progress=False)
    print(f"statistics of the whole training set: test accuracy {accuracy(model, test_images, test_labels):.3f}")


if __name__ == "__main__":
    main()
