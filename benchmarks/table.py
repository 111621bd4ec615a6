"""The README's tables from a committed result of the GPU's benchmark, or from the results of the experiments.

    PYTHONPATH=src python benchmarks/table.py benchmarks/results/h200.json                     # print the markdown
    PYTHONPATH=src python benchmarks/table.py benchmarks/results/h200.json --targets           # print the targets
    PYTHONPATH=src python benchmarks/table.py benchmarks/results/h200.json --write README.md   # put it into a document
    PYTHONPATH=src python benchmarks/table.py results --write README.md            # BN against IterNorm: does it pay?

The document has a line `<!-- bench:h200 -->`, named as the file or folder is, and after it a line `<!-- /bench -->`.
"""

import argparse
import json
from pathlib import Path

from iternorm.bench import gpu as cuda
from iternorm.experiments.evidence import pays
from iternorm.experiments.jobs import registry


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path, help="what `iternorm bench --device cuda --json` wrote, or results/")
    parser.add_argument("--targets", action="store_true", help="the targets instead of the times")
    parser.add_argument("--write", type=Path, metavar="DOCUMENT", help="put the markdown between its markers")
    arguments = parser.parse_args()
    if arguments.result.is_dir():
        content = pays.markdown(pays.rows(registry.contrasts(arguments.result))[0])
    else:
        result = json.loads(arguments.result.read_text(encoding="utf-8"))
        content = cuda.markdown_targets(result) if arguments.targets else cuda.markdown(result)
    if arguments.write is None:
        print(content)
        return
    try:
        text = cuda.put_between_markers(arguments.write.read_text(encoding="utf-8"), arguments.result.stem, content)
    except ValueError as error:
        parser.error(f"{arguments.write}: {error}")
    arguments.write.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
