"""
What whitening does to a cloud of points
========================================

Two correlated channels, and what each norm makes of them. A point keeps its colour, so you see how a solver turns the
cloud. BatchNorm stretches along the axes and leaves the correlation. Exact whitening removes it. IterNorm goes there
step by step, the direction of large variance first.
"""

import colorsys

import matplotlib.pyplot as plt
import torch
from torch import nn

import iternorm

# Sixteen times as much variance along one direction as along the other.
turn = torch.tensor([[0.866, -0.5], [0.5, 0.866]])
white = torch.randn(600, 2)
points = (white * torch.tensor([2.0, 0.5])) @ turn.T + torch.tensor([1.0, 0.5])
angles = torch.atan2(white[:, 1], white[:, 0]) / (2 * torch.pi) % 1
colors = [colorsys.hsv_to_rgb(angle, 0.75, 0.8) for angle in angles.tolist()]

# %%
# Each layer in training mode, with both channels in one group. ``shape`` is the covariance of what comes out.

norms = {
    "input": nn.Identity(),
    "BatchNorm": nn.BatchNorm1d(2),
    "DBN, ZCA": iternorm.DecorrelatedBatchNorm1d(2, solver="zca"),
    "DBN, PCA": iternorm.DecorrelatedBatchNorm1d(2, solver="pca"),
    "DBN, Cholesky": iternorm.DecorrelatedBatchNorm1d(2, solver="cholesky"),
    **{f"IterNorm, T = {steps}": iternorm.IterNorm1d(2, num_iters=steps) for steps in (1, 3, 5, 7)},
}
with torch.no_grad():
    clouds = {name: norm(points) for name, norm in norms.items()}

# %%
# The ellipse is two standard deviations of the cloud; of white data it is the dashed circle.

figure, panels = plt.subplots(2, 5, figsize=(11, 5.2))
circle = torch.linspace(0, 2 * torch.pi, 100)
circle = torch.stack([circle.cos(), circle.sin()])
order = [*list(clouds)[:5], None, *list(clouds)[5:]]
for axes, name in zip(panels.flat, order, strict=True):
    axes.set(xlim=(-5, 5), ylim=(-5.2, 4.8), aspect="equal", xticks=[], yticks=[])
    axes.spines[:].set_visible(False)
    if name is None:
        axes.text(0, 0, "IterNorm goes\nstep by step →", ha="center", va="center", fontsize=11)
        continue
    cloud = clouds[name]
    covariance = cloud.T.cov(correction=0)
    ellipse = cloud.mean(0)[:, None] + 2 * torch.linalg.cholesky(covariance) @ circle
    axes.scatter(*cloud.T, s=5, c=colors, linewidths=0, alpha=0.8)
    axes.plot(*(2 * circle), color="#7d8590", linewidth=1, linestyle=(0, (4, 3)))
    axes.plot(*ellipse, color="#7d8590", linewidth=2)
    axes.set_title(name, fontsize=12)
    axes.text(0, -5, f"correlation {torch.corrcoef(cloud.T)[0, 1]:.2f}", ha="center", fontsize=10)
plt.show()

# %%
# The three exact solvers differ by a rotation alone. ZCA moves the points least, which is why DBN uses it.

for name in ("DBN, ZCA", "DBN, PCA", "DBN, Cholesky"):
    centred = points - points.mean(0)
    print(f"{name}: points move by {(clouds[name] - centred).norm(dim=1).mean():.2f} on average")
