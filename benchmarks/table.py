"""The documents' tables from committed results.

    PYTHONPATH=src python benchmarks/table.py benchmarks/results/h200.json                     # print the markdown
    PYTHONPATH=src python benchmarks/table.py benchmarks/results/h200.json --targets           # print the targets
    PYTHONPATH=src python benchmarks/table.py benchmarks/results/h200.json --write README.md   # put it into a document
    PYTHONPATH=src python benchmarks/table.py benchmarks/results/networks-h200.json --write README.md
    PYTHONPATH=src python benchmarks/table.py benchmarks/results/cpu-epyc.json --write README.md
    PYTHONPATH=src python benchmarks/table.py benchmarks/results/spectrum.json --write docs/choosing.md
    PYTHONPATH=src python benchmarks/table.py results --write README.md            # BN against IterNorm: does it pay?

The document has a line `<!-- bench:h200 -->`, named as the file or folder is, and after it a line `<!-- /bench -->`.
"""

import argparse
import json
from pathlib import Path

from iternorm import bench
from iternorm.experiments.evidence import pays
from iternorm.experiments.jobs import registry


def markdown(result: dict) -> str:
    """The table of a result of any kind: of a GPU, of a CPU, or of spectra."""
    if "spectrum" in result:
        return spectrum(result)
    if "roots" in result:
        return bench.gpu.markdown_roots(result)
    if "networks" in result:
        return bench.gpu.markdown_networks(result)
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
    parser.add_argument("--write", type=Path, metavar="DOCUMENT", help="put the markdown between its markers")
    arguments = parser.parse_args()
    if arguments.result.is_dir():
        content = pays.markdown(pays.rows(registry.contrasts(arguments.result))[0])
    else:
        result = json.loads(arguments.result.read_text(encoding="utf-8"))
        content = bench.gpu.markdown_targets(result) if arguments.targets else markdown(result)
    if arguments.write is None:
        print(content)
        return
    try:
        text = bench.gpu.put_between_markers(
            arguments.write.read_text(encoding="utf-8"), arguments.result.stem, content
        )
    except ValueError as error:
        parser.error(f"{arguments.write}: {error}")
    arguments.write.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
