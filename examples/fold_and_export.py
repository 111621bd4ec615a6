"""Fold IterNorm into the convolutions of a trained network and ship it as ONNX.

    pip install 'iternorm[onnx]' scikit-learn
    python examples/fold_and_export.py --output digits.onnx

Trains a small network on handwritten digits, folds it, prints what went where, exports it with a dynamic batch, and
compares onnxruntime with the unfolded network.
"""

import argparse
from pathlib import Path
from typing import Any

import onnxruntime
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

import iternorm


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1, bias=False),
        iternorm.IterNorm2d(32),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, stride=2, padding=1, bias=False),
        iternorm.IterNorm2d(64),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        iternorm.IterNorm1d(64),
        nn.Linear(64, 10),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--output", type=Path, default=Path("digits.onnx"))
    args = parser.parse_args()
    torch.manual_seed(0)
    data: Any = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32)[:, None] / 8 - 1
    labels = torch.tensor(data.target)

    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for _ in range(args.steps):
        batch = torch.randint(1400, (128,))
        optimizer.zero_grad()
        cross_entropy(model(images[batch]), labels[batch]).backward()
        optimizer.step()
    model.eval()

    folded, table = iternorm.fold(model)
    print(table)
    words = {"dynamic_shapes": ({0: "batch"},), "external_data": False}
    torch.onnx.export(folded, (images[:2],), args.output, dynamo=True, verbose=False, **words)

    session = onnxruntime.InferenceSession(args.output)
    test = images[1400:]
    output: Any = session.run(None, {session.get_inputs()[0].name: test.numpy()})[0]
    with torch.no_grad():
        expected = model(test)
    difference = (torch.from_numpy(output) - expected).abs().max().item()
    accuracy = (output.argmax(1) == labels[1400:].numpy()).mean()
    print(f"{args.output}: {args.output.stat().st_size} bytes, test accuracy {accuracy:.3f}")
    print(f"largest difference to the unfolded network in torch: {difference:.1e}")


if __name__ == "__main__":
    main()
