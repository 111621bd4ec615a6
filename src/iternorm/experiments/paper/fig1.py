"""Figure 1: BN, DBN and IterNorm, step by step, on two-dimensional data.

Reproduces: the paper's Figure 1, an illustration on centred data.
Claim: BN stretches along the axes to unit variance and leaves the correlation; DBN (ZCA) stretches along the
eigenvectors until the covariance is the identity; IterNorm approaches that step by step, the direction of the larger
eigenvalue first.
Command: iternorm run fig1 && iternorm plot fig1
Cost: less than a second.
The paper got: a drawing without numbers. Ours prints each panel's variances along the eigenvectors.
Departures: the paper does not give its data; ours is Gaussian with eigenvalues 4 and 0.25, rotated by 30 degrees.
"""

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from iternorm.analysis import Whitening, covariance
from iternorm.experiments.jobs.findings import Claim, measured
from iternorm.experiments.jobs.registry import Context, Plan
from iternorm.experiments.jobs.results import Config, Result, Row
from iternorm.report import palette

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PANELS = ("data", "BN", "DBN", *(f"IterNorm T={steps}" for steps in (0, 1, 2, 3, 5)))


def jobs(plan: Plan) -> list[Config]:
    """One job."""
    return [{"job": "smoke" if plan.smoke else "all", "examples": 60 if plan.smoke else 600, "seed": 0}]


def run(config: Config, context: Context) -> list[Row]:
    """One row for each panel: covariance, variances along the eigenvectors of the data, and the points."""
    generator = torch.Generator().manual_seed(config["seed"])
    angle = torch.tensor(torch.pi / 6, dtype=torch.float64)
    turn = torch.stack([torch.stack([angle.cos(), -angle.sin()]), torch.stack([angle.sin(), angle.cos()])])
    deviations = torch.tensor([2.0, 0.5], dtype=torch.float64)
    data = torch.randn(config["examples"], 2, generator=generator, dtype=torch.float64) * deviations @ turn.T
    data -= data.mean(0)
    directions = torch.linalg.eigh(covariance(data)).eigenvectors.flip(1)
    rows = []
    for index, name in enumerate(PANELS):
        points = data
        if name != "data":
            (maps,) = Whitening.parse(name).fit(data[None])
            grouped = data.unflatten(1, (-1, maps.linear.shape[-1]))
            points = (torch.einsum("gij,ngj->ngi", maps.linear[0], grouped) + maps.shift[0]).flatten(1)
        # BN turns the axes of the ellipse: only variances along fixed directions compare.
        along = (points @ directions).var(0, correction=0)
        rows.append(
            {
                "panel": name,
                "covariance": _rounded(covariance(points), 6),
                "variance_along_eigenvectors": _rounded(along, 6),
                "directions": _rounded(directions.T, 6),
                "points": _rounded(points, 3),
            }
        )
        context.step(index + 1, len(PANELS))
    return rows


def _rounded(values: torch.Tensor, digits: int) -> list:
    return torch.round(values, decimals=digits).tolist()


def plot(results: Sequence[Result]) -> "Figure":
    """Eight panels on one scale, with the ellipse of two deviations."""
    import numpy as np
    from matplotlib.figure import Figure

    (result,) = results
    figure = Figure(figsize=(10, 5.4), layout="constrained")
    turns = np.linspace(0, 2 * np.pi, 120)
    circle = 2 * np.stack([np.cos(turns), np.sin(turns)])
    for axes, row in zip(figure.subplots(2, 4, sharex=True, sharey=True).flat, result.rows, strict=True):
        x, y = np.array(row["points"]).T
        # As pixels: thousands of points would be most of a page of vector graphics.
        axes.scatter(x, y, s=2, color="#5b6675", alpha=0.6, linewidths=0, rasterized=True)
        values, vectors = np.linalg.eigh(np.array(row["covariance"]))
        color = palette.color_of(row["panel"]) or palette.GREY
        axes.plot(*(vectors * np.sqrt(values)) @ circle, color=color, linewidth=1.5)
        for direction, variance in zip(row["directions"], row["variance_along_eigenvectors"], strict=True):
            end = 2 * np.sqrt(variance) * np.array(direction)
            axes.plot([0, end[0]], [0, end[1]], color="black", linewidth=1.2)
        large, small = row["variance_along_eigenvectors"]
        axes.set_title(f"{row['panel']}: variance {large:.2f}, {small:.2f}", fontsize=9)
        axes.set_aspect("equal")
        axes.set_xlim(-5, 5)
        axes.set_ylim(-4, 4)
        axes.grid(alpha=0.2)
    figure.suptitle("Variance along the two eigenvectors (lines), and two deviations (ellipse)", fontsize=10)
    return figure


def claims(results: Sequence[Result]) -> list[Claim]:
    """What each panel is said to show."""
    texts = (
        "BN stretches along the axes to unit variance and leaves the correlation.",
        "DBN stretches along the eigenvectors until the covariance is the identity.",
        "IterNorm stretches along the eigenvectors step by step, the larger eigenvalue first.",
    )
    if not results:
        return [Claim(text, measured(None), "") for text in texts]
    panels = {row["panel"]: row for row in results[0].rows}
    (first, mixed), (_, second) = panels["BN"]["covariance"]
    standardized = abs(first - 1) < 1e-3 and abs(second - 1) < 1e-3 and abs(mixed) > 0.1
    dbn = panels["DBN"]["covariance"]
    farthest = max(abs(dbn[i][j] - (i == j)) for i in range(2) for j in range(2))
    steps = {name: row["variance_along_eigenvectors"] for name, row in panels.items() if name.startswith("IterNorm")}
    # A variance that has arrived stays where it is, up to the digits that are kept.
    nearer = all(
        abs(1 - after[i]) <= abs(1 - before[i]) + 1e-5
        for before, after in itertools.pairwise(steps.values())
        for i in range(2)
    )
    first_larger = all(abs(1 - large) < abs(1 - small) for large, small in steps.values())
    return [
        Claim(texts[0], measured(standardized), f"variances {first:.3f} and {second:.3f}, correlation {mixed:.3f}"),
        Claim(texts[1], measured(farthest < 1e-3), f"every entry of the covariance is within {farthest:.0e} of it"),
        Claim(
            texts[2],
            measured(nearer and first_larger),
            "variance along the two eigenvectors: "
            + "; ".join(f"{name.split()[1]} {large:.2f}, {small:.2f}" for name, (large, small) in steps.items()),
        ),
    ]
