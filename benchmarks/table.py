"""The documents' tables from committed results.

    PYTHONPATH=src python benchmarks/table.py benchmarks/results/h200.json                     # print the markdown
    PYTHONPATH=src python benchmarks/table.py benchmarks/results/h200.json --targets           # print the targets
    PYTHONPATH=src python benchmarks/table.py benchmarks/results/spectrum.json --write docs/choosing.md  # put it there
    PYTHONPATH=src python benchmarks/table.py benchmarks/results/networks-h200.json --short --write README.md
    PYTHONPATH=src python benchmarks/table.py results --write README.md            # BN against IterNorm: does it pay?

The document has a line `<!-- bench:spectrum -->`, named as the file or folder is, with `-short` behind it for a short
table, and after it a line `<!-- /bench -->`. The site (docs/_ext/results.py) makes the long tables when it is built.
"""

import argparse
import json
from pathlib import Path

from iternorm import bench
from iternorm.experiments.evidence import pays
from iternorm.experiments.jobs import overview


def markdown(result: dict, *, short: bool = False) -> str:
    """The table of a result of any kind: of a GPU, of a CPU, or of spectra; of whole networks a short one too."""
    if "spectrum" in result:
        return spectrum(result)
    if "roots" in result:
        return bench.gpu.markdown_roots(result)
    if "networks" in result:
        return bench.gpu.markdown_ratios(result) if short else bench.gpu.markdown_networks(result)
    return bench.gpu.markdown(result) if "training" in result else bench.markdown(result)


def spectrum(result: dict) -> str:
    """A line for each output that `spectrum.py` looked at."""
    columns = list(result["spectrum"][0])
    lines = ["| " + " | ".join(columns) + " |", "| --- |" + " ---: |" * (len(columns) - 1)]
    for row in result["spectrum"]:
        name, *values = row.values()
        lines.append(f"| {name} | " + " | ".join(f"{value:.3f}" for value in values) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path, help="what `iternorm bench --json` or spectrum.py wrote, or results/")
    parser.add_argument("--targets", action="store_true", help="a GPU's targets instead of the times")
    parser.add_argument("--short", action="store_true", help="of whole networks the ratios to BatchNorm only")
    parser.add_argument("--write", type=Path, metavar="DOCUMENT", help="put the markdown between its markers")
    arguments = parser.parse_args()
    if arguments.result.is_dir():
        content = pays.markdown(pays.rows(overview.contrasts(arguments.result))[0])
    else:
        result = json.loads(arguments.result.read_text(encoding="utf-8"))
        content = bench.gpu.markdown_targets(result) if arguments.targets else markdown(result, short=arguments.short)
    if arguments.write is None:
        print(content)
        return
    try:
        text = bench.gpu.put_between_markers(
            arguments.write.read_text(encoding="utf-8"), arguments.result.stem + "-short" * arguments.short, content
        )
    except ValueError as error:
        parser.error(f"{arguments.write}: {error}")
    arguments.write.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
