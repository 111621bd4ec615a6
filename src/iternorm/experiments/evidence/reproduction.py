"""The report on the paper: for every figure and table its claims, its numbers beside ours, and how ours were made.

The report depends on results alone: the same results give the same text. A user's own study has a report too.
"""

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from iternorm.experiments.evidence import blocks, pays
from iternorm.experiments.evidence.blocks import Block, Command, Drawing, Link, Section, Table, Verdicts
from iternorm.experiments.jobs import overview, registry
from iternorm.experiments.jobs.findings import Claim, Comparison, Contrast, Verdict
from iternorm.experiments.jobs.mistakes import StudyError
from iternorm.experiments.jobs.overview import State
from iternorm.experiments.jobs.registry import Experiment
from iternorm.experiments.jobs.results import Result
from iternorm.experiments.jobs.stopwatch import duration
from iternorm.report.files import write_figure_atomically, write_text_atomically

_TITLE = "The paper's figures and tables, reproduced"
_SUBTITLE = "Huang et al., Iterative Normalization, CVPR 2019"
_INTRODUCTION = (
    "Every figure and table of *Iterative Normalization: Beyond Standardization towards Efficient Whitening* (Huang et "
    "al., CVPR 2019), as `iternorm run` made it. A claim is what the paper says, in a sentence; its verdict is a "
    "function of the results, not of a hand. ± is the standard deviation over n seeds unless it says otherwise. What "
    "was not run says so."
)
_MEANINGS = {
    Verdict.HOLDS: "three seeds or more on each side, and a difference of more than two standard errors (Welch's), or "
    "that much more than a margin, which stands beside the verdict. A claim of no difference holds if none is seen and "
    "the errors are small enough to see one. Measurements without training are compared as they are",
    Verdict.FAILS: "the same, the other way round",
    Verdict.UNDECIDED: "two seeds; or a difference within two standard errors; or seeds diverged on the side that "
    "seems better; or leaving out one seed would choose another learning rate, and with it another verdict",
    Verdict.ONE_SEED: "it points to the claim, against it, or neither way. A test error points somewhere if it differs "
    "by more than two binomial errors of the test set, a training error or loss whenever it differs",
    Verdict.NOT_RUN: "all of it, or what it is compared with",
}

# Simulated with Gaussian values of equal means: 12 % with equal deviations, 17 % where one is five times the other.
_CHANCE = (
    "Two standard errors of three seeds say less than those of many: where there is no difference at all, chance "
    "decides one comparison in six to nine, half of them each way."
)


def write(root: Path, folder: Path, experiments: Sequence[Experiment] | None = None) -> list[Path]:
    """Write ``reproduction.md`` and ``reproduction.html`` into `folder`, and each figure beside its results.

    Args:
        root: The folder of results.
        folder: Where to write.
        experiments: A report of these alone, in ``ID.md`` and ``ID.html``, or in ``report.md`` where there are several.
    """
    name = name_of(experiments)
    title, summary, sections = _collect(root, experiments)
    for section in sections:
        for block in section.blocks:
            if isinstance(block, Drawing):
                write_figure_atomically(block.path, block.figure)
    subtitle = _SUBTITLE if experiments is None else ""
    return [
        write_text_atomically(folder / f"{name}.md", blocks.markdown(title, summary, sections, folder)),
        write_text_atomically(folder / f"{name}.html", blocks.page(title, subtitle, summary, sections)),
    ]


def name_of(experiments: Sequence[Experiment] | None) -> str:
    """What the files of `write` are called, without their suffixes."""
    return "reproduction" if experiments is None else experiments[0].id if len(experiments) == 1 else "report"


def _collect(root: Path, experiments: Sequence[Experiment] | None = None) -> tuple[str, list[Block], list[Section]]:
    """The title, the blocks of the summary, and the sections of the experiments."""
    chosen = experiments if experiments is not None else [registry.get(name) for name in registry.EXPERIMENTS]
    sections: list[Section] = []
    rows = []
    counted: list[Claim] = []
    trained: list[Claim] = []
    contrasts: list[Contrast] = []
    for experiment in chosen:
        state = overview.survey(experiment, root)
        contrasts += experiment.contrasts(state.finished)
        claims = experiment.claims(state.finished)
        if experiment.is_papers:
            counted += claims
            trained += claims if experiment.trains else []
        # With spaces that do not break: the column is narrow.
        done = f"{len(state.finished)}\u00a0of\u00a0{state.total}"
        title = experiment.title.rstrip(".")
        rows.append((Link(experiment.id), title, _counted(claims), done))
        sections.append(Section(experiment.id, title, _section(experiment, state, claims, root)))
    summary: list[Block] = []
    if experiments is None:
        summary += [_INTRODUCTION, *_does_it_pay(contrasts)]
    if experiments is None or len(chosen) > 1:
        summary.append(Table(("id", "what", "claims", "runs"), tuple(rows)))
    if counted:
        summary.append(f"Of {len(counted)} claims of the paper: {_counted(counted)}.")
        if trained and len(trained) < len(counted):
            about = f"Of the {len(trained)} claims about trained networks: {_counted(trained)}."
            summary.append(f"{about} The others are about drawn data and times.")
    if any(row[2].said for row in rows):
        legend = tuple((Verdicts(((verdict, verdict.value),)), meaning) for verdict, meaning in _MEANINGS.items())
        summary += ["What the verdicts mean:", Table(("verdict", "it takes"), legend), _CHANCE]
    title = _TITLE if experiments is None else sections[0].title if len(chosen) == 1 else "Studies"
    return title, summary, sections


def _does_it_pay(contrasts: Sequence[Contrast]) -> list[Block]:
    """The short table: BN against IterNorm, network by network."""
    rows, missing = pays.rows(contrasts)
    if not rows:
        return []
    found: list[Block] = [
        "**Does it pay?** Final test errors in % of every network that was trained with BN and with the paper's "
        "IterNorm (T=5), whichever way they came out. ± here is the standard error of the difference; where a side has "
        "one seed, the binomial error of the test set."
    ]
    found.append(Table(*pays.cells(rows)))
    return [*found, f"Not run with both: {'; '.join(missing)}."] if missing else found


def _section(experiment: Experiment, state: State, claims: Sequence[Claim], root: Path) -> list[Block]:
    parts: list[Block] = []
    if not state.finished:
        parts.append(f"**Not run**: none of {state.total} runs is finished. {_remedy(experiment)}")
    elif state.missing:
        names = _shortened([config["job"] for config in state.missing])
        parts.append(
            f"**Run in part**: {len(state.finished)} of {state.total} runs are finished; missing: {names}. "
            + _remedy(experiment)
        )
    for reason in state.unusable:
        parts.append(f"Not used: {reason}.")
    for note in state.notes:
        parts.append(f"**Warning:** {note}.")
    if claims:
        found = ((claim.evidence if state.finished else "") or "–" for claim in claims)
        cells = ((claim.text, verdict_of(claim), what) for claim, what in zip(claims, found, strict=True))
        said = "the paper says" if experiment.is_papers else "claim"
        parts.append(Table((said, "verdict", "what was found"), tuple(cells)))
    elif text := experiment.field("Claim"):
        parts.append(f"The claim, not checked by a function: {text}")
    comparisons = [number for number in experiment.compare(state.finished) if not number.is_empty]
    if comparisons:
        parts.append(numbers(comparisons))
    for name in ("The paper got", "Departures"):
        if text := experiment.field(name):
            parts.append(f"**{name}:** {text}")
    if state.finished:
        path = root / experiment.id / f"{experiment.id}.png"
        try:
            parts.append(Drawing(experiment.plot(state.finished), path, experiment.title.rstrip(".")))
        except StudyError as error:
            # What else a study's report has is not lost with its figure.
            parts.append(f"**The figure could not be drawn:** {error}.")
    parts.append(Command(experiment.field("Command")))
    if state.finished:
        columns = ("machine", "software", "how", "commit", "date", "runs", "time, added up")
        parts.append(Table(columns, _origins(state.finished)))
        parts += _data(state.finished)
    return parts


def _remedy(experiment: Experiment) -> str:
    return f"What it would take: the command below; {experiment.cost}." if experiment.cost else ""


def _shortened(names: Sequence[str], most: int = 8) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(f"`{name}`" for name in names[:most]) + more


def verdict_of(claim: Claim) -> Verdicts:
    """The verdict on a claim as a cell."""
    return Verdicts(((claim.verdict, str(claim.finding) + (f", in {claim.coverage}" if claim.coverage else "")),))


def _counted(claims: Sequence[Claim]) -> Verdicts:
    """How many claims have which verdict, and on how much of what they are about.

    Example:
        >>> from iternorm.experiments.jobs.findings import measured
        >>> claims = [Claim("a", measured(holds), "") for holds in (True, None)]
        >>> str(_counted([*claims, Claim("b", measured(True), "", "1 of 4 configurations")]))
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
            text = f"{len(found)} on one seed only: {_pointing(found)}"
        if parts := Counter(claim.coverage for claim in found if claim.coverage):
            text += f" ({', '.join(_covered(count, len(found), part) for part, count in parts.items())})"
        counted.append((verdict, text))
    return Verdicts(tuple(counted))


def _pointing(claims: Sequence[Claim]) -> str:
    ways = Counter(claim.finding.points for claim in claims)
    words = {True: "for", False: "against", None: "neither way"}
    return ", ".join(f"{ways[way]} {word}" for way, word in words.items() if ways[way])


def _covered(count: int, of: int, part: str) -> str:
    return f"in {part}" if count == of else f"{'one' if count == 1 else count} in {part}"


def numbers(comparisons: Sequence[Comparison]) -> Table:
    """The paper's numbers beside ours; a column that would be empty is left out."""
    columns = {
        "number": [number.what for number in comparisons],
        "the paper": [f"{number.paper} {number.unit}".strip() if number.paper else "" for number in comparisons],
        "ours": [_ours(number) for number in comparisons],
        "n": [str(number.count or len(number.ours)) if number.ours else "" for number in comparisons],
        "note": [number.note for number in comparisons],
    }
    kept = {name: cells for name, cells in columns.items() if any(cells)}
    # A note may be empty, a number that is missing is a dash.
    rows = zip(*([cell or ("" if name == "note" else "–") for cell in kept[name]] for name in kept), strict=True)
    return Table(tuple(kept), tuple(rows))


def _ours(number: Comparison) -> str:
    """Mean and deviation, in as many decimals as the paper's number has.

    Example:
        >>> _ours(Comparison("BN", "7.5", (7.0, 8.0)))
        '7.5 ± 0.7 %'
    """
    if not number.ours:
        return "diverged" if number.num_diverged else "not run"
    finite = [value for value in number.ours if math.isfinite(value)]
    if not finite:
        return "diverged"
    mean = statistics.fmean(finite)
    decimals = _decimals(number, mean)
    text = f"{mean:.{decimals}f}"
    if len(finite) > 1:
        text += f" ± {statistics.stdev(finite):.{decimals}f}"
    text = f"{text} {number.unit}".rstrip()
    lost = len(number.ours) - len(finite)
    return f"{text}, {lost} diverged" if lost else text


def _decimals(number: Comparison, mean: float) -> int:
    """The paper's; where it has no number two of an error, and of anything else as many as make three digits."""
    if number.paper:
        return len(number.paper.split()[0].partition(".")[2])
    if number.unit in ("%", "points"):
        return 2
    return max(2 - math.floor(math.log10(abs(mean))), 0) if mean else 0


def _origins(finished: Iterable[Result]) -> tuple[tuple[str, ...], ...]:
    """A row for the runs that are alike in machine, software, the way they were run, and commit."""
    groups: dict[tuple[str, ...], list[Result]] = {}
    for result in finished:
        made = result.provenance
        machine = made.get("machine", {})
        where = str(machine.get("gpu") or "") or f"{machine.get('cpu', 'unknown')}, {machine.get('cores', '?')} cores"
        software = f"torch {made.get('torch', {}).get('version', '?')}"
        commit, _, dirty = (made.get("commit") or "").partition("-")
        code = commit[:7] + (" and uncommitted changes" if dirty else "")
        # An installed package knows its version alone.
        code = code or f"iternorm {made.get('iternorm', '?')}"
        if study := made.get("study_file"):
            code += f"; {study.get('name')} {str(study.get('sha256'))[:10]}"
        key = (where, software, _how(result), code)
        groups.setdefault(key, []).append(result)
    rows = []
    # The oldest first.
    for key, group in sorted(groups.items(), key=lambda found: min(map(_time, found[1]))):
        days = sorted({_time(result)[:10] for result in group})
        when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
        rows.append((*key, when, str(len(group)), duration(sum(result.seconds for result in group))))
    return tuple(rows)


def _time(result: Result) -> str:
    return str(result.provenance.get("time", ""))


def _how(result: Result) -> str:
    """Number of processes, precision and compilation; results of earlier versions do not tell all of it.

    Example:
        >>> made = {"processes": 1, "precision": "tf32", "compile": False}
        >>> [_how(Result("fig6", config, [], 1.0, made)) for config, made in (({}, made), ({"precision": "bf16"}, {}))]
        ['1 process, tf32', 'bf16']
    """
    made, known = result.provenance, []
    if "processes" in made:
        known.append(f"{made['processes']} process{'es' if made['processes'] > 1 else ''}")
    if precision := made.get("precision", result.config.get("precision")):
        known.append(precision)
    if made.get("compile"):
        known.append("compiled")
    return ", ".join(known) or "unknown"


def _data(finished: Iterable[Result]) -> list[Block]:
    """What the folders of images held."""
    records = {_described(result) for result in finished if result.provenance.get("data")}
    return [f"**Data:** {'; '.join(sorted(records))}."] if records else []


def _described(result: Result) -> str:
    """What a folder of images held; a study's own data may have noted less.

    Example:
        >>> _described(Result("mine", {}, [], 1.0, {"data": {"name": "pictures", "classes": 3, "test_images": 1200}}))
        'pictures: 3 classes, 1,200 test images'
    """
    data = result.provenance["data"]
    counts = {what: result.data_count(f"{split}_images") for split, what in (("train", "training"), ("test", "test"))}
    images = " and ".join(f"{count:,} {what}" for what, count in counts.items() if count is not None)
    classes = result.data_count("classes")
    known = [*([f"{classes} classes"] if classes is not None else []), *([f"{images} images"] if images else [])]
    text = f"{data.get('name', 'without a name')}: {', '.join(known) or 'not counted'}"
    listing = data.get("listing_sha256")
    return f"{text}; sha256 of the list of files {listing[:16]}" if isinstance(listing, str) else text
