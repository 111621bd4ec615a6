"""What `analyze` found: plain values, as a table for a terminal, as JSON and as a page."""

import json
import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

FORMAT = "iternorm-analysis-1"


@dataclass(frozen=True)
class SideAnalysis:
    """One side of a layer, its input or its output, over all examples.

    Attributes:
        condition_number: Largest eigenvalue of the covariance over the smallest; infinite without full rank.
        mean_absolute_correlation: Of different channels.
        effective_rank: Exponential of the entropy of the spectrum.
        spectrum: (rank, eigenvalue), descending; evenly thinned where there are many.
        correlation: Absolute correlations, averaged over square blocks where there are many channels.
    """

    condition_number: float
    mean_absolute_correlation: float
    effective_rank: float
    spectrum: list[tuple[int, float]]
    correlation: list[list[float]]


@dataclass(frozen=True)
class NoiseEstimate:
    """SND of an operation at a batch size, its standard error, and SND as a share of the output's norm."""

    operation: str
    batch_size: int
    snd: float
    standard_error: float
    relative: float


@dataclass(frozen=True)
class AlternativeAnalysis:
    """What another operation would do with the same input."""

    operation: str
    condition_number: float
    mean_absolute_correlation: float
    noise: list[NoiseEstimate]


@dataclass(frozen=True)
class LayerAnalysis:
    """One layer.

    Attributes:
        name: Its name in the model.
        kind: Its class.
        operation: What it does in training: ``BN``, ``IterNorm T=5 d=64``, or its class.
        num_channels: C.
        num_samples: Samples (examples by positions) that entered the covariances.
        num_examples: Examples seen.
        num_positions: Positions of an example in the last batch.
        before: The input.
        after: The output, scale and shift included.
        noise: SND of the layer's own operation by batch size; empty where that is not known or not asked for.
        noise_pool: Examples that the batches of the SND estimates were drawn from.
        alternatives: What other operations would do.
        drift: Root mean square distance, in units of the normalized output, between what the running statistics give
            and what the statistics of the data give; None where there are none.
    """

    name: str
    kind: str
    operation: str
    num_channels: int
    num_samples: int
    num_examples: int
    num_positions: int
    before: SideAnalysis
    after: SideAnalysis
    noise: list[NoiseEstimate]
    noise_pool: int
    alternatives: list[AlternativeAnalysis]
    drift: float | None


@dataclass(frozen=True)
class ModelAnalysis:
    """All layers of a model, in the order of ``model.named_modules()``.

    Attributes:
        model: Class of the model.
        mode: ``"train"`` or ``"eval"``.
        layers: The layers.
        unreached: Names of layers that no call reached.
    """

    model: str
    mode: str
    layers: list[LayerAnalysis]
    unreached: list[str] = field(default_factory=list)

    @property
    def batch_sizes(self) -> list[int]:
        """The batch sizes that SND was estimated for."""
        sizes = {n.batch_size for layer in self.layers for n in layer.noise}
        sizes |= {n.batch_size for layer in self.layers for other in layer.alternatives for n in other.noise}
        return sorted(sizes)

    def rows(self) -> tuple[list[str], list[list[str]]]:
        """Column names and one row of text a layer, as in `table`."""
        sizes = self.batch_sizes
        columns = ["layer", "operation", "channels", "samples", "κ in", "κ out", "|r| in", "|r| out", "rank in"]
        columns += [f"SND B={size}" for size in sizes] + ["drift"]
        rows = []
        for layer in self.layers:
            noise = {estimate.batch_size: estimate.snd for estimate in layer.noise}
            values = [layer.before.condition_number, layer.after.condition_number]
            values += [layer.before.mean_absolute_correlation, layer.after.mean_absolute_correlation]
            values += [layer.before.effective_rank, *(noise.get(size) for size in sizes), layer.drift]
            head = [layer.name or "(model)", layer.operation, str(layer.num_channels), str(layer.num_samples)]
            rows.append(head + [number(value) for value in values])
        return columns, rows

    def alternative_rows(self, batch_size: int | None = None) -> tuple[list[str], list[list[str]]]:
        """Names of the alternatives, and rows of a layer's name, then condition number and SND of each alternative.

        SND is at `batch_size`, the largest if None.
        """
        batch_size = batch_size if batch_size is not None else max(self.batch_sizes, default=None)
        names = list(dict.fromkeys(other.operation for layer in self.layers for other in layer.alternatives))
        rows = []
        for layer in self.layers:
            row = [layer.name or "(model)"]
            for other in layer.alternatives:
                noise = {estimate.batch_size: estimate.snd for estimate in other.noise}
                row += [number(other.condition_number), number(noise.get(batch_size or 0))]
            rows.append(row)
        return names, rows

    def table(self, *, batch_size: int | None = None) -> str:
        """The layers as text, and below what the alternatives would do at `batch_size` (the largest, if None)."""
        text = [_aligned(*self.rows()), "\n".join(self.notes())]
        if any(layer.alternatives for layer in self.layers):
            size = batch_size if batch_size is not None else max(self.batch_sizes, default=None)
            title = "What other normalizations would do with the same inputs: κ" + (
                f", SND at B={size}" if size else ""
            )
            names, rows = self.alternative_rows(size)
            # The name of an operation is the header of its two columns.
            cells = [[row[0], *(f"{a.rjust(7)} {b.rjust(6)}" for a, b in _pairs(row[1:]))] for row in rows]
            text += [title, _aligned(["layer", *names], cells)]
        return "\n\n".join(part for part in text if part)

    def notes(self) -> list[str]:
        """Notes on the numbers: what the symbols mean, and where an estimate falls short."""
        notes = ["κ: condition number; |r|: mean absolute correlation; rank: effective rank; SND: batch noise"]
        few = [layer.name or "(model)" for layer in self.layers if layer.num_samples <= layer.num_channels]
        if few:
            notes.append(f"no more samples than channels, so κ is infinite (give more batches): {', '.join(few)}")
        infinite = [
            layer.name or "(model)"
            for layer in self.layers
            if layer.num_samples > layer.num_channels
            and math.inf in (layer.before.condition_number, layer.after.condition_number)
        ]
        if infinite:
            notes.append(f"κ is infinite where a direction of the channels has no variance: {', '.join(infinite)}")
        largest = max(self.batch_sizes, default=0)
        pools = [layer.noise_pool for layer in self.layers if layer.noise_pool]
        if pools and min(pools) < 4 * largest:
            share = 1 - math.sqrt(1 - largest / min(pools))
            notes.append(
                f"SND at B={largest} is too small by about {share:.0%}: only {min(pools)} examples to draw from"
            )
        if self.unreached:
            notes.append(f"not reached by any call: {', '.join(self.unreached)}")
        return notes

    def to_json(self, path: str | os.PathLike[str] | None = None) -> str:
        """All values as JSON, written to `path` where one is given. An infinite condition number is null."""
        text = json.dumps(_finite({"format": FORMAT, **asdict(self)}), allow_nan=False)
        if path is not None:
            from iternorm.report.files import write_text_atomically

            write_text_atomically(path, text + "\n")
        return text

    def to_html(self, path: str | os.PathLike[str] | None = None) -> str:
        """One page that needs nothing else, written to `path` where one is given."""
        from iternorm.analysis.page import page
        from iternorm.report.files import write_text_atomically

        text = page(self)
        if path is not None:
            write_text_atomically(path, text)
        return text


def number(value: float | None) -> str:
    """Three digits; a dash for what was not measured."""
    if value is None:
        return "-"
    if math.isinf(value):
        return "inf"
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}" if abs(value) < 1e5 else f"{value:.1e}"


def _aligned(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    rows = [[_shortened(row[0]), *row[1:]] for row in rows]
    widths = [max(len(cell) for cell in column) for column in zip(columns, *rows, strict=True)]
    left = {index for index, name in enumerate(columns) if name in ("layer", "operation")}

    def line(cells: Sequence[str]) -> str:
        padded = [c.ljust(w) if i in left else c.rjust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True))]
        return "  ".join(padded).rstrip()

    return "\n".join([line(columns), line(["-" * width for width in widths]), *(line(row) for row in rows)])


def _pairs(cells: Sequence[str]) -> list[tuple[str, str]]:
    return list(zip(cells[::2], cells[1::2], strict=True))


def _shortened(name: str, width: int = 60) -> str:
    return name if len(name) <= width else name[: width // 2 - 1] + "…" + name[-width // 2 :]


def _finite(value: object) -> object:
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
