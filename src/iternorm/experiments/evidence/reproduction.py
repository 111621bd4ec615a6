"""The report on the paper: for every figure and table its claims, its numbers beside ours, and how ours were made.

The report is made of results alone: the same results give the same text. It is put together once, of paragraphs, tables
and figures, and written twice, as Markdown and as a page.
"""

import math
import os
import re
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from iternorm.experiments.jobs import registry
from iternorm.experiments.jobs.findings import Claim, Comparison, Verdict
from iternorm.experiments.jobs.registry import Experiment, State
from iternorm.experiments.jobs.results import Result
from iternorm.report.files import write_text_atomically
from iternorm.report.html import figure_svg, html_page, html_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_TITLE = "The paper's figures and tables, reproduced"
_INTRODUCTION = (
    "Every figure and table of *Iterative Normalization: Beyond Standardization towards Efficient Whitening* (Huang et "
    "al., CVPR 2019), as `iternorm run` made it. A claim is a sentence of the paper; whether it holds is decided by a "
    "function of the results, not by hand. ± is the standard deviation over n seeds. What was not run says so."
)


@dataclass(frozen=True)
class _Table:
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class _Drawing:
    figure: "Figure"
    path: Path
    label: str


# A paragraph may have `code` and *emphasis*.
_Block = str | _Table | _Drawing


def write(root: Path, folder: Path) -> list[Path]:
    """Write ``reproduction.md`` and ``reproduction.html`` into `folder`, and each figure beside its results."""
    summary, sections = _collect(root)
    for _, blocks in sections:
        for block in blocks:
            if isinstance(block, _Drawing):
                block.path.parent.mkdir(parents=True, exist_ok=True)
                block.figure.savefig(block.path, dpi=110)
    return [
        write_text_atomically(folder / "reproduction.md", _markdown(summary, sections, folder)),
        write_text_atomically(folder / "reproduction.html", _page(summary, sections)),
    ]


def _collect(root: Path) -> tuple[list[_Block], list[tuple[str, list[_Block]]]]:
    """The blocks of the summary, and those of each experiment under its id."""
    sections: list[tuple[str, list[_Block]]] = []
    rows = []
    every: list[Claim] = []
    for name in registry.EXPERIMENTS:
        experiment = registry.get(name)
        state = registry.survey(experiment, root)
        claims = experiment.claims(state.finished)
        every += claims
        # With spaces that do not break: the column is narrow.
        done = f"{len(state.finished)}\u00a0of\u00a0{state.total}"
        rows.append((name, experiment.title.rstrip("."), _counted(claims), done))
        sections.append((name, _section(experiment, state, claims, root)))
    total = f"Of {len(every)} claims: {_counted(every)}." if every else ""
    table = _Table(("id", "what", "claims", "runs"), tuple(rows))
    return [_INTRODUCTION, table, *([total] if total else [])], sections


def _section(experiment: Experiment, state: State, claims: Sequence[Claim], root: Path) -> list[_Block]:
    blocks: list[_Block] = [experiment.title]
    if not state.finished:
        blocks.append(f"**Not run**: none of {state.total} runs is finished. {_remedy(experiment)}")
    elif state.missing:
        names = _shortened([config["job"] for config in state.missing])
        blocks.append(
            f"**Run in part**: {len(state.finished)} of {state.total} runs are finished; missing: {names}. "
            + _remedy(experiment)
        )
    for reason in state.unusable:
        blocks.append(f"Not used: {reason}.")
    if claims:
        found = ((claim.evidence if state.finished else "") or "–" for claim in claims)
        rows = ((claim.text, _verdict(claim), what) for claim, what in zip(claims, found, strict=True))
        blocks.append(_Table(("the paper says", "verdict", "what was found"), tuple(rows)))
    else:
        blocks.append(f"The paper's claim, not checked by a function: {experiment.field('Claim')}")
    # A number that neither has says nothing.
    comparisons = [number for number in experiment.compare(state.finished) if number.paper or number.ours]
    if comparisons:
        # The notes are the last column.
        columns = 5 if any(number.note for number in comparisons) else 4
        numbers = tuple(_compared(number)[:columns] for number in comparisons)
        blocks.append(_Table(("number", "the paper", "ours", "n", "note")[:columns], numbers))
    for name in ("The paper got", "Departures"):
        if text := experiment.field(name):
            blocks.append(f"**{name}:** {text}")
    if state.finished:
        path = root / experiment.id / f"{experiment.id}.png"
        blocks.append(_Drawing(experiment.plot(state.finished), path, experiment.title.rstrip(".")))
    if not state.missing:
        blocks.append(f"**Command:** `{experiment.field('Command')}`")
    if state.finished:
        columns = ("machine", "software", "commit", "date", "runs", "time, added up")
        blocks.append(_Table(columns, _origins(state.finished)))
    return blocks


def _remedy(experiment: Experiment) -> str:
    return f"What it would take: `{experiment.field('Command')}`; {experiment.cost}."


def _shortened(names: Sequence[str], most: int = 8) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(f"`{name}`" for name in names[:most]) + more


def _verdict(claim: Claim) -> str:
    return str(claim.finding) + (f", in {claim.coverage}" if claim.coverage else "")


def _counted(claims: Sequence[Claim]) -> str:
    """How many claims have which verdict, and on how much of what they are about.

    Example:
        >>> from iternorm.experiments.jobs.findings import measured
        >>> claims = [Claim("a", measured(holds), "") for holds in (True, None)]
        >>> _counted([*claims, Claim("b", measured(True), "", "1 of 4 configurations")])
        '2 hold (one in 1 of 4 configurations), 1 not run'
    """
    plural = {Verdict.HOLDS: "hold", Verdict.FAILS: "do not hold"}
    counted = []
    for verdict in Verdict:
        found = [claim for claim in claims if claim.verdict is verdict]
        if not found:
            continue
        text = f"{len(found)} {plural.get(verdict, verdict.value) if len(found) > 1 else verdict.value}"
        if verdict is Verdict.ONE_SEED:
            text = f"{len(found)} on one seed only"
        if parts := Counter(claim.coverage for claim in found if claim.coverage):
            text += f" ({', '.join(_covered(count, len(found), part) for part, count in parts.items())})"
        counted.append(text)
    return ", ".join(counted)


def _covered(count: int, of: int, part: str) -> str:
    return f"in {part}" if count == of else f"{'one' if count == 1 else count} in {part}"


def _compared(number: Comparison) -> tuple[str, ...]:
    paper = f"{number.paper} {number.unit}".strip() if number.paper else "–"
    count = number.count or len(number.ours)
    return number.what, paper, _ours(number), str(count) if number.ours else "–", number.note


def _ours(number: Comparison) -> str:
    """Mean and deviation.

    Example:
        >>> _ours(Comparison("BN", "7.5", (7.0, 8.0)))
        '7.50 ± 0.71 %'
    """
    if not number.ours:
        return "not run"
    finite = [value for value in number.ours if math.isfinite(value)]
    if not finite:
        return "diverged"
    mean = statistics.fmean(finite)
    # Errors are printed as the paper prints them, anything else to three digits.
    decimals = 2 if number.unit == "%" else max(2 - math.floor(math.log10(abs(mean))), 0) if mean else 0
    text = f"{mean:.{decimals}f}"
    if len(finite) > 1:
        text += f" ± {statistics.stdev(finite):.{decimals}f}"
    text = f"{text} {number.unit}".rstrip()
    lost = len(number.ours) - len(finite)
    return f"{text}, {lost} diverged" if lost else text


def _origins(finished: Iterable[Result]) -> tuple[tuple[str, ...], ...]:
    """A row for the runs that are alike in machine, software and commit."""
    groups: dict[tuple[str, str, str], list[Result]] = {}
    for result in finished:
        made = result.provenance
        machine = made.get("machine", {})
        where = machine.get("gpu") or f"{machine.get('cpu', 'unknown')}, {machine.get('cores', '?')} cores"
        software = f"torch {made.get('torch', {}).get('version', '?')}, iternorm {made.get('iternorm', '?')}"
        commit, _, dirty = (made.get("commit") or "unknown").partition("-")
        key = (where, software, commit[:10] + (f" ({dirty})" if dirty else ""))
        groups.setdefault(key, []).append(result)
    rows = []
    for key, group in groups.items():
        days = sorted({str(result.provenance.get("time", ""))[:10] for result in group})
        when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
        rows.append((*key, when, str(len(group)), duration(sum(result.seconds for result in group))))
    return tuple(rows)


def duration(seconds: float) -> str:
    """A length of time, for reading.

    Example:
        >>> duration(0.42), duration(75), duration(7380)
        ('0.4 s', '1 min 15 s', '2 h 3 min')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def _markdown(summary: Sequence[_Block], sections: Sequence[tuple[str, Sequence[_Block]]], folder: Path) -> str:
    def rendered(block: _Block) -> str:
        if isinstance(block, _Drawing):
            return f"![{block.label}]({Path(os.path.relpath(block.path, folder)).as_posix()})"
        if isinstance(block, _Table):
            lines = [block.columns, ("---",) * len(block.columns), *block.rows]
            return "\n".join("| " + " | ".join(map(_markdown_cell, line)) + " |" for line in lines)
        return block

    ids = {name for name, _ in sections}
    parts = [f"# {_TITLE}", "Written by `iternorm report`: do not edit."]
    for block in summary:
        text = rendered(block)
        parts.append(re.sub(r"^\| (\w+) ", lambda m: _linked(m[1], ids), text, flags=re.MULTILINE))
    for name, blocks in sections:
        parts += [f"## {name}", *map(rendered, blocks)]
    return "\n\n".join(parts) + "\n"


def _linked(word: str, ids: set[str]) -> str:
    return f"| [{word}](#{word.lower()}) " if word in ids else f"| {word} "


def _markdown_cell(text: str) -> str:
    # Stars and underscores of a name, Baseline* for one, are no emphasis.
    return re.sub(r"([|*_~<])", r"\\\1", text) if "`" not in text else text.replace("|", "\\|")


def _page(summary: Sequence[_Block], sections: Sequence[tuple[str, Sequence[_Block]]]) -> str:
    def rendered(block: _Block) -> str:
        if isinstance(block, _Drawing):
            return f"<figure>{figure_svg(block.figure, label=block.label)}</figure>"
        if isinstance(block, _Table):
            return html_table(block.columns, block.rows)
        return f"<p>{_html_text(block)}</p>"

    first = "\n".join(map(rendered, summary))
    for name, _ in sections:
        first = first.replace(f"<td>{name}</td>", f'<td><a href="#{name}">{name}</a></td>')
    pages = [("Summary", first)]
    pages += [(name, f'<span id="{name}"></span>\n' + "\n".join(map(rendered, blocks))) for name, blocks in sections]
    return html_page(_TITLE, pages, subtitle="Huang et al., Iterative Normalization, CVPR 2019")


def _html_text(text: str) -> str:
    """A paragraph's marks as HTML.

    Example:
        >>> _html_text("**a** < `b*`")
        '<strong>a</strong> &lt; <code>b*</code>'
    """
    parts = escape(text, quote=False).split("`")
    for index in range(0, len(parts), 2):
        parts[index] = re.sub(r"\*\*(.+?)\*\*", r"<strong>\1</strong>", parts[index])
        parts[index] = re.sub(r"\*(.+?)\*", r"<em>\1</em>", parts[index])
    for index in range(1, len(parts), 2):
        parts[index] = f"<code>{parts[index]}</code>"
    return "".join(parts)
