"""Directives for tables that are made from committed results when the site is built.

{timing} h200              a table of benchmarks/results/h200.json, as benchmarks/table.py writes it
{cost} IterNorm DBN        a step with BatchNorm and with these, on a GPU and on a CPU
{pays}                     BN against IterNorm in every network that was trained with both
{claims} fig4 imagenette   what the paper says, the verdict, and what was found
{numbers} fig4 table1      the paper's numbers beside ours
:only: DBN             those with this word
    :without: top-5        those without it
"""

import json
import runpy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

from docutils import nodes
from docutils.parsers.rst import directives
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from iternorm.experiments.evidence import pays, reproduction
from iternorm.experiments.evidence.blocks import Table, markdown_table
from iternorm.experiments.jobs import overview, registry

ROOT = Path(__file__).resolve().parents[2]
TIMINGS = ROOT / "benchmarks" / "results"
# A method's name in the tables, and in the files of timings: a layer on a GPU, a network on a GPU, a layer on a CPU.
NAMES = {
    "BatchNorm": ("BatchNorm2d", "BatchNorm2d", "BatchNorm2d"),
    "IterNorm": ("IterNorm T=5 d=64", "IterNorm d=64", "IterNorm T=5 d=64"),
    "DBN": ("DBN d=16 kernels", "DBN d=16 kernels", "DBN d=16"),
    "authors": ("authors' T=5 d=64", "", "authors' T=5 d=64"),
}
TITLES = {"IterNorm": "IterNorm, d=64", "DBN": "DBN, d=16", "authors": "the authors' formulation, d=64"}


class FromResults(SphinxDirective):
    """Parses the Markdown that a function makes of the directive's arguments."""

    optional_arguments = 9
    option_spec: ClassVar[dict[str, Callable[[str], Any]]] = {
        "only": directives.unchanged,
        "without": directives.unchanged,
    }
    make: ClassVar[Callable[..., str]]

    def run(self) -> list[nodes.Node]:
        """The table's nodes."""
        text = type(self).make(*self.arguments, **self.options)
        box = nodes.Element()
        self.state.nested_parse(StringList(text.splitlines(), source=self.get_source_info()[0]), 0, box)
        return box.children


def _load(name: str) -> dict[str, Any]:
    return json.loads((TIMINGS / f"{name}.json").read_text(encoding="utf-8"))


def timing(name: str) -> str:
    """What `benchmarks/table.py` prints of a file."""
    return runpy.run_path(str(ROOT / "benchmarks" / "table.py"))["markdown"](_load(name))


def cost(*methods: str) -> str:
    """Times of a training step in ms, BatchNorm's first, each with its ratio to BatchNorm's in the same run."""
    chosen = ("BatchNorm", *methods)
    lines = [["a training step of"] + [TITLES.get(name, name) + ", ms" for name in chosen]]
    lines.append(["---"] + ["---:"] * len(chosen))
    for label, times in _steps():
        base, _ = times(NAMES["BatchNorm"])
        lines.append([label, f"{base:.3g}", *(_cell(*times(NAMES[name]), base) for name in methods)])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _cell(time: float | None, ratio: float | None, base: float) -> str:
    return "–" if time is None else f"{time:.3g} ({ratio or time / base:.2f}×)"


def _steps() -> Iterator[tuple[str, Callable[[tuple[str, str, str]], Any]]]:
    """What is timed, and for a method's names its time and, if its run may be another one, the ratio to BatchNorm's."""
    gpu, cpu = _load("h200"), _load("cpu-epyc")
    for case in gpu["cases"]:
        if case["shape"] in ([64, 128, 32, 32], [256, 64, 112, 112]):
            where = f"one layer, {'x'.join(map(str, case['shape']))} {case['dtype']}, H200"

            def layer(names: tuple[str, str, str], case: dict = case) -> Any:
                # The faster layout; of BatchNorm the fastest of all kinds, those that torch.compile makes included.
                alike = str.startswith if names[0] == "BatchNorm2d" else str.__eq__
                found = [row["graph_ms"] for row in case["rivals"] if alike(row["name"], names[0]) and row["graph_ms"]]
                return min(found, default=None), None

            yield where, layer
    for setting in gpu["training"]:

        def network(names: tuple[str, str, str], setting: dict = setting) -> Any:
            found = (
                (row["step_ms"], row["ratio_to_batch_norm"]) for row in setting["networks"] if row["name"] == names[1]
            )
            return next(found, (None, None))

        yield f"VGG, batch {setting['batch_size']}, {setting['dtype']} {setting['layout']}, H200", network
    for case in cpu["cases"]:

        def on_cpu(names: tuple[str, str, str], case: dict = case) -> Any:
            return next((row["median_ms"] for row in case["rivals"] if row["name"] == names[2]), None), None

        yield f"one layer, {'x'.join(map(str, case['shape']))} float32, 2 CPU cores", on_cpu


def does_it_pay() -> str:
    """The short table of the evidence."""
    return pays.markdown(pays.rows(overview.contrasts(ROOT / "results"))[0])


def claims(*experiments: str, only: str = "") -> str:
    """The claims of some experiments."""
    rows = []
    for name in experiments:
        experiment = registry.get(name)
        finished = overview.survey(experiment, ROOT / "results").finished
        rows += [
            (claim.text, reproduction.verdict_of(claim), claim.evidence or "–")
            for claim in experiment.claims(finished)
            if only in claim.text
        ]
    return markdown_table(Table(("the paper says", "verdict", "what was found"), tuple(rows)))


def numbers(*experiments: str, only: str = "", without: str = "\n") -> str:
    """The paper's numbers beside ours, those that we have first."""
    found = []
    for name in experiments:
        experiment = registry.get(name)
        finished = overview.survey(experiment, ROOT / "results").finished
        found += [
            number
            for number in experiment.compare(finished)
            if only in number.what and without not in number.what and not number.is_empty
        ]
    return markdown_table(reproduction.numbers(sorted(found, key=lambda number: not number.ours)))


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directives."""
    made = {"timing": timing, "cost": cost, "pays": does_it_pay, "claims": claims, "numbers": numbers}
    for name, make in made.items():
        app.add_directive(name, type(name, (FromResults,), {"make": staticmethod(make)}))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
