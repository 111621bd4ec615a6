"""The benchmark where only torch is installed: the same run as `iternorm bench`, printed as plain text.

PYTHONPATH=src python benchmarks/run.py --device cuda --json results.json
"""

import argparse
import json
from pathlib import Path

from iternorm import bench


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--rounds", type=int, default=15, help="timings of each layer")
    parser.add_argument("--threads", type=int, help="CPU threads; torch's own number unless given")
    parser.add_argument("--json", type=Path, help="write all timings to this file")
    arguments = parser.parse_args()
    try:
        result = bench.run(device=arguments.device, rounds=arguments.rounds, threads=arguments.threads)
    except ValueError as error:
        parser.error(str(error))
    for case in result["cases"]:
        print(
            "x".join(map(str, case["shape"])), case["dtype"], "channels_last" if case["channels_last"] else "contiguous"
        )
        for row in case["rivals"]:
            print(
                f"  {row['name']:20s} {row['median_ms']:9.3f} ms  {row['ratio_to_convolution']:6.2f} conv  "
                f"{row['ratio_to_batch_norm']:6.2f} BN  extra memory {row['extra_activations']:.2f}"
            )
    print("\n".join(bench.notes(result)))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
