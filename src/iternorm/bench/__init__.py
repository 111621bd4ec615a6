"""Times the layers against baselines: forward and backward, interleaved, in one run. See benchmarks/README.md.

`run` is for the CPU; `gpu.run` is for a GPU, which is measured in other ways.

result = run(rounds=15)          # a dictionary that json.dumps takes
for case in result["cases"]:
    rich.print(table(case))
"""

from iternorm.bench import gpu
from iternorm.bench.cpu_table import markdown, notes, table
from iternorm.timing.cpu.candidates import PAPER_MS, Candidate, standard_candidates
from iternorm.timing.cpu.comparison import TABLE_A1, Case, check_arguments, count_timings, run

__all__ = [
    "PAPER_MS",
    "TABLE_A1",
    "Candidate",
    "Case",
    "check_arguments",
    "count_timings",
    "gpu",
    "markdown",
    "notes",
    "run",
    "standard_candidates",
    "table",
]
