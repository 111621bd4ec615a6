"""
Fold, export, time
==================

In eval mode a whitening layer is one affine map, so it can become part of the convolution before it. What is left is a
network of torch's own layers, which exports to a file and runs without this package.
"""

import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch import nn
from torch.utils.benchmark import Timer

import iternorm
from iternorm.report.palette import color_of


def network(norm):
    layers = []
    for channels_in, channels_out, stride in [(3, 32, 1), (32, 64, 2), (64, 64, 1), (64, 128, 2)]:
        layers += [nn.Conv2d(channels_in, channels_out, 3, stride, 1, bias=False), norm(channels_out), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))


images = torch.randn(64, 3, 32, 32)
models = {"BN": network(nn.BatchNorm2d), "IterNorm": network(iternorm.IterNorm2d)}
for model in models.values():
    for _ in range(3):
        model(images)  # running statistics
    model.eval()

# %%
# The table says where each layer went, and why.

folded, table = iternorm.fold(models["IterNorm"])
print(table)
with torch.no_grad():
    difference = (folded(images) - models["IterNorm"](images)).abs().max()
print(f"largest difference of the outputs: {difference:.1e}")

# %%
# The file holds operators of torch only, and takes batches of any size.

program = torch.export.export(folded, (images,), dynamic_shapes=({0: torch.export.Dim("batch")},))
with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "network.pt2"
    torch.export.save(program, path)
    loaded = torch.export.load(path).module()
    print(f"{path.name}: {path.stat().st_size} bytes, output for 5 images {list(loaded(images[:5]).shape)}")

# %%
# A forward pass on one core of this machine. Unfolded, a layer is a 1x1 convolution in eval mode. Folded, there is no
# norm left to compute.

models["IterNorm, folded"] = folded
timers = {name: Timer("model(images)", globals={"model": model, "images": images}) for name, model in models.items()}
with torch.inference_mode():
    # In turns, and the fastest of them: other work on the machine only adds time.
    rounds = [{name: timer.timeit(3).median for name, timer in timers.items()} for _ in range(8)]
times = {name: 1e3 * min(found[name] for found in rounds) for name in timers}

figure, axes = plt.subplots(figsize=(7, 2.4))
colors = [color_of("BN"), color_of("IterNorm T=5"), "#7d8590"]
bars = axes.barh(list(times), list(times.values()), color=colors)
axes.bar_label(bars, fmt="%.1f ms", padding=4)
axes.invert_yaxis()
axes.margins(x=0.15)
axes.set(xlabel="ms for 64 images of 32x32")
plt.show()
