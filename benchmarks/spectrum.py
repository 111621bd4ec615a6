"""What whitening leaves of a spectrum: eigenvalues of the covariance of IterNorm's and DBN's outputs.

    PYTHONPATH=src python benchmarks/spectrum.py --json benchmarks/results/spectrum.json
    PYTHONPATH=src python benchmarks/table.py benchmarks/results/spectrum.json --write docs/choosing.md

The input is the activation of `iternorm bench`, 64x64x32x32: standard normal samples whose channels are mixed by the
matrix I + N / 8, N having standard normal entries, so that the channels are correlated. All 64 are one group.
"""

import argparse
import json
from pathlib import Path

import torch
from torch import Tensor

from iternorm import functional
from iternorm.report.files import write_text_atomically
from iternorm.report.provenance import provenance
from iternorm.timing.cpu.comparison import TABLE_A1

NUM_ITERS = (0, 1, 3, 5, 7, 9, 15)
QUANTILES = {"smallest": 0.0, "10 %": 0.1, "median": 0.5, "90 %": 0.9, "largest": 1.0}


def measure() -> dict:
    """The spectrum of the input and of every output."""
    x = TABLE_A1[0].make(torch.device("cpu"))[0].detach()
    rows = [{"output of": "the input itself", **_spectrum(x)}]
    for steps in NUM_ITERS:
        rows.append(
            {"output of": f"IterNorm T={steps}", **_spectrum(functional.iter_norm(x, training=True, num_iters=steps))}
        )
    exact = functional.decorrelated_batch_norm(x, training=True, group_size=None)
    rows.append({"output of": "DBN", **_spectrum(exact)})
    return {"provenance": provenance(), "shape": list(x.shape), "spectrum": rows}


def _spectrum(x: Tensor) -> dict[str, float]:
    eigenvalues = torch.linalg.eigvalsh(torch.cov(x.transpose(0, 1).flatten(1).double(), correction=0))
    places = torch.tensor(list(QUANTILES.values()), dtype=torch.float64)
    return {name: value.item() for name, value in zip(QUANTILES, eigenvalues.quantile(places), strict=True)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the result, with machine, versions and commit, to this file")
    arguments = parser.parse_args()
    text = json.dumps(measure(), indent=1)
    print(text)
    if arguments.json is not None:
        write_text_atomically(arguments.json, text + "\n")


if __name__ == "__main__":
    main()
