"""
Spectra of a network, before and after
======================================

The eigenvalues of a layer's covariance are the variances along its principal directions. If they are equal, gradient
descent moves equally fast in all of them. Here a small network learns handwritten digits with BatchNorm, and then we
look at what each norm would make of the inputs of its last norm.
"""

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import nn

from iternorm import analysis

digits = load_digits()
images, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)


def block(channels_in, channels_out):
    return nn.Linear(channels_in, channels_out), nn.BatchNorm1d(channels_out), nn.ReLU()


model = nn.Sequential(*block(64, 64), *block(64, 64), *block(64, 64), nn.Linear(64, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
for _ in range(100):
    batch = torch.randint(1400, (256,))
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
    optimizer.step()
accuracy = (model.eval()(images[1400:]).argmax(1) == labels[1400:]).float().mean()
print(f"test accuracy {accuracy:.3f}")

# %%
# The inputs of the last norm, and the spectrum of what each operation makes of them.

with torch.no_grad():
    features = model[:7](images).double()
before = analysis.covariance(features)
operations = {
    "BN": analysis.batch_norm(),
    "DBN": analysis.decorrelated_batch_norm(group_size=16),
    **{f"IterNorm T={steps}": analysis.iter_norm(steps) for steps in (1, 3, 5, 7)},
}
after = {name: operation.normalized_covariance(before) for name, operation in operations.items()}
for name, covariance in {"input": before, **after}.items():
    number, rank = analysis.condition_number(covariance), analysis.effective_rank(covariance)
    print(f"{name:14} condition number {number:9.2g}, effective rank {rank:5.1f} of 64")

# %%
# BatchNorm hardly changes the curve. DBN whitens within groups of 16 and leaves correlation between groups. Each step
# of IterNorm brings more of the large eigenvalues to one level, and multiplies the small ones by no more than 9/4.

from iternorm.report.palette import color_of

figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), sharey=True)
for axes, names in ((left, ("BN", "DBN", "IterNorm T=5")), (right, [name for name in after if "T=" in name])):
    values = analysis.spectrum(before)
    axes.plot(range(1, 65), values / values.mean(), color="#7d8590", linestyle=":", label="input")
    for name in names:
        values = analysis.spectrum(after[name])
        axes.plot(range(1, 65), values / values.mean(), color=color_of(name), label=name)
    axes.axhline(1, color="#7d8590", linewidth=0.8)
    axes.set(yscale="log", xlabel="eigenvalue, largest first")
    axes.grid(True)
    axes.legend(loc="lower left")
left.set_ylabel("eigenvalue / their mean")
left.set_title("three norms")
right.set_title("IterNorm, step by step")
plt.show()
