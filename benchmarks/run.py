"""The benchmark where only torch is installed: the same run as `iternorm bench`, printed as plain text.

PYTHONPATH=src python benchmarks/run.py --device cuda --json results.json
"""

import argparse
import json
import sys
import time
from pathlib import Path

from iternorm import bench
from iternorm.report.files import write_text_atomically


def cpu_lines(result: dict) -> list[str]:
    lines = []
    for case in result["cases"]:
        layout = "channels_last" if case["channels_last"] else "contiguous"
        lines.append(f"{'x'.join(map(str, case['shape']))} {case['dtype']} {layout}")
        lines += [
            f"  {row['name']:20s} {row['median_ms']:9.3f} ms  {row['ratio_to_convolution']:6.2f} conv  "
            f"{row['ratio_to_batch_norm']:6.2f} BN  extra memory {row['extra_activations']:.2f}"
            for row in case["rivals"]
        ]
    return lines + bench.notes(result)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--rounds", type=int, default=15, help="timings of each layer")
    parser.add_argument("--threads", type=int, help="CPU threads; torch's own number unless given")
    parser.add_argument("--quick", action="store_true", help="on cuda: two activations and few rounds, about a minute")
    parser.add_argument("--networks", action="store_true", help="on cuda: whole training steps, eager and compiled")
    parser.add_argument("--sync", action="store_true", help="on cuda: the local part of synchronized layers")
    parser.add_argument("--roots", action="store_true", help="on cuda: roots of matrices, Whitener, GroupWhitening")
    parser.add_argument("--only", nargs="*", help="with --networks or --roots: parts by name, as 'VGG 256 eager'")
    parser.add_argument("--json", type=Path, help="write all timings to this file")
    arguments = parser.parse_args()
    try:
        parts = arguments.networks, arguments.sync, arguments.roots
        bench.check_arguments(arguments.device, arguments.rounds, arguments.threads, arguments.quick, *parts)
    except ValueError as error:
        parser.error(str(error))

    def save(result: dict) -> None:
        if arguments.json is not None:
            write_text_atomically(arguments.json, json.dumps(result, indent=1) + "\n")

    start = time.perf_counter()
    if arguments.device == "cuda":

        def progress(part: str) -> None:
            print(f"{time.perf_counter() - start:6.1f} s  {part}", file=sys.stderr, flush=True)

        if arguments.networks:
            result = bench.gpu.run_networks(rounds=arguments.rounds, only=arguments.only, progress=progress, save=save)
            lines = bench.gpu.network_lines(result)
        elif arguments.sync:
            result = bench.gpu.run_synchronized(rounds=arguments.rounds, progress=progress, save=save)
            lines = bench.gpu.synchronized_lines(result)
        elif arguments.roots:
            result = bench.gpu.run_roots(rounds=arguments.rounds, only=arguments.only, progress=progress, save=save)
            lines = bench.gpu.root_lines(result)
        else:
            result = bench.gpu.run(rounds=arguments.rounds, quick=arguments.quick, progress=progress, save=save)
            lines = bench.gpu.lines(result)
    else:
        result = bench.run(rounds=arguments.rounds, threads=arguments.threads)
        lines = cpu_lines(result)
    save(result)
    print("\n".join(lines))


if __name__ == "__main__":
    main()
