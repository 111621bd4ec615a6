"""
Noise of the batch: SND against T and the batch size
====================================================

Stochastic Normalization Disturbance (SND) is how far the output of a sample moves when it is normalized with another
batch. Whitening further improves the conditioning and adds noise; T chooses between them.
"""

import matplotlib.pyplot as plt
import torch

import iternorm
from iternorm import analysis
from iternorm.report.palette import color_of

data = torch.randn(4000, 64) @ torch.diag(torch.linspace(0.3, 2, 64)) @ torch.linalg.qr(torch.randn(64, 64))[0]


def noise(operation, batch_size):
    return analysis.snd(operation, data, batch_size, samples=200, draws=40).relative


def conditioning(operation):
    return analysis.condition_number(operation.normalized_covariance(analysis.covariance(data))).item()


# %%
# As a share of the output's norm, because a small T makes the output smaller, and the learned scale makes up for that.

steps = range(10)
norms = {"BN": analysis.batch_norm(), "DBN": analysis.decorrelated_batch_norm()}
iterated = [analysis.iter_norm(num_iters) for num_iters in steps]
look = {"color": color_of("IterNorm T=5"), "marker": "o", "label": "IterNorm"}
figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8))
left.plot(steps, [conditioning(operation) for operation in iterated], **look)
right.plot(steps, [100 * noise(operation, 256) for operation in iterated], **look)
for name, operation in norms.items():
    left.axhline(conditioning(operation), color=color_of(name), label=name)
    right.axhline(100 * noise(operation, 256), color=color_of(name), label=name)
left.set(yscale="log", xlabel="T", title="condition number of the output")
right.set(xlabel="T", ylim=(0, None), title="SND in % of the output, batches of 256")
for axes in (left, right):
    axes.set_xticks(steps)
    axes.grid(True)
    axes.legend()
plt.show()

# %%
# Noise falls with the batch size. DBN divides the few directions that a small batch does not reach by a tiny number.
# GroupWhitening looks at each sample by itself and has no such noise at all.

sizes = [16, 32, 64, 128, 256, 512, 1024]
norms["IterNorm T=5"] = analysis.iter_norm(5)
figure, axes = plt.subplots(figsize=(7, 3.8))
for name, operation in norms.items():
    axes.plot(sizes, [100 * noise(operation, size) for size in sizes], "o-", color=color_of(name), label=name)
layer = iternorm.GroupWhitening1d(64, num_groups=8)
with torch.no_grad():
    alone, together = layer(data[:1]), layer(data)[:1]
moved = 100 * ((alone - together).norm() / together.norm()).item()
axes.plot(sizes, [moved] * len(sizes), "o-", color="#7b5ea7", label="GroupWhitening")
axes.set_xscale("log", base=2)
axes.set_yscale("symlog", linthresh=1)
axes.set(xlabel="batch size", ylabel="SND in % of the output", ylim=(-0.2, None), xticks=sizes)
axes.set_xticklabels(map(str, sizes))
axes.grid(True)
axes.legend()
plt.show()
