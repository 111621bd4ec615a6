"""The page of a model's analysis: a table, curves over depth, and a fold-out panel for each layer."""

from collections.abc import Callable, Mapping
from html import escape

from iternorm.analysis.summary import LayerAnalysis, ModelAnalysis, SideAnalysis, number
from iternorm.report.html import html_page, html_table
from iternorm.report.palette import colors_of
from iternorm.report.plots import Points, line_svg, matrix_img

# Wider than other pages: a table of a model has many columns.
_STYLE = """<style>
main { max-width: 84rem; }
details { border-bottom: 1px solid var(--rule); padding: 0.35rem 0; }
summary { cursor: pointer; }
summary .details { color: var(--soft); margin-left: 0.75rem; font-size: 0.93rem; }
.panel { display: flex; flex-wrap: wrap; gap: 0.5rem 1.5rem; align-items: flex-start; margin: 0.75rem 0; }
.panel > svg, .panel > .plot { flex: 1 1 22rem; }
.panel figure { margin: 0; }
</style>"""


def page(analysis: ModelAnalysis) -> str:
    """The analysis as one self-contained HTML page."""
    sections = [("Over depth", _STYLE + _depth(analysis)), ("Layers", _layers(analysis))]
    if any(layer.alternatives for layer in analysis.layers):
        sections.append(("What other normalizations would do", _alternatives(analysis)))
    # The panels of few layers are open; a hundred would be a page nobody scrolls through.
    opened = len(analysis.layers) <= 6
    sections.append(("Layer by layer", "\n".join(_panel(layer, opened) for layer in analysis.layers)))
    layers = len(analysis.layers)
    subtitle = f"{analysis.model}, {layers} layer{'s' if layers != 1 else ''}, measured in {analysis.mode} mode"
    return html_page(f"Normalization of {analysis.model}", sections, subtitle=subtitle)


def _layers(analysis: ModelAnalysis) -> str:
    columns, rows = analysis.rows()
    notes = "".join(f"<li>{escape(note)}</li>" for note in analysis.notes())
    return html_table(columns, _with_signs(rows)) + f"<ul>{notes}</ul>"


def _with_signs(rows: list[list[str]]) -> list[list[str]]:
    """Rows for a page, which has a sign for infinity; not every terminal has one. The first cell is a name."""
    return [[row[0], *("∞" if cell == "inf" else cell for cell in row[1:])] for row in rows]


def _number(value: float) -> str:
    return number(value).replace("inf", "∞")


def _depth(analysis: ModelAnalysis) -> str:
    def sides(value: Callable[[SideAnalysis], float]) -> dict[str, list[tuple[int, float]]]:
        return {
            "in": [(i, value(layer.before)) for i, layer in enumerate(analysis.layers)],
            "out": [(i, value(layer.after)) for i, layer in enumerate(analysis.layers)],
        }

    plots = [
        _over_depth(analysis, sides(lambda side: side.condition_number), "Condition number", y_log=True),
        _over_depth(analysis, sides(lambda side: side.mean_absolute_correlation), "Mean absolute correlation"),
    ]
    noise = {
        f"B={size}": [
            (i, n.snd) for i, layer in enumerate(analysis.layers) for n in layer.noise if n.batch_size == size
        ]
        for size in analysis.batch_sizes
    }
    if any(noise.values()):
        plots.append(_over_depth(analysis, noise, "SND of the layer's own operation", y_log=True))
    drift = [(i, layer.drift) for i, layer in enumerate(analysis.layers) if layer.drift is not None]
    if drift:
        plots.append(_over_depth(analysis, {"drift": drift}, "Drift of the running statistics"))
    return f'<div class="panel">{"".join(plots)}</div>'


def _over_depth(analysis: ModelAnalysis, curves: Mapping[str, Points], title: str, *, y_log: bool = False) -> str:
    """Curves over the layers, which are named as in the tables."""
    names = {float(i): layer.name or "(model)" for i, layer in enumerate(analysis.layers)}
    step = -(-len(names) // 12)
    return line_svg(
        curves,
        title=title,
        x_label="layer",
        y_label="",
        y_log=y_log,
        markers=len(names) <= 30,
        x_ticks=list(names)[::step],
        x_names=names,
    )


def _alternatives(analysis: ModelAnalysis) -> str:
    size = max(analysis.batch_sizes, default=None)
    caption = "Condition number κ over all examples" + (f", and SND at batch size {size}" if size else "")
    names, rows = analysis.alternative_rows(size)
    columns = ["layer", *(f"{what} {name}" for name in names for what in ("κ", "SND"))]
    return html_table(columns, _with_signs(rows), caption=caption)


def _panel(layer: LayerAnalysis, opened: bool) -> str:
    spectra = line_svg(
        {"in": layer.before.spectrum, "out": layer.after.spectrum},
        title="Spectrum of the covariance",
        x_label="rank of the eigenvalue",
        y_label="eigenvalue",
        y_log=True,
    )
    noise = {layer.operation: layer.noise} if layer.noise else {}
    # An alternative that equals the layer's own operation gets no second curve.
    alternatives = {a.operation: a.noise for a in layer.alternatives}
    noise |= {name: estimates for name, estimates in alternatives.items() if name != layer.operation}
    parts = [spectra]
    if any(noise.values()):
        parts.append(
            line_svg(
                {name: [(n.batch_size, n.snd) for n in estimates] for name, estimates in noise.items()},
                title="SND by batch size",
                x_label="batch size",
                y_label="SND",
                x_log=True,
                y_log=True,
                markers=True,
                x_ticks=sorted({n.batch_size for estimates in noise.values() for n in estimates}),
                errors={name: [n.standard_error for n in estimates] for name, estimates in noise.items()},
                # In the order of the alternatives, which is that of every layer.
                colors=colors_of([*alternatives, *noise]),
            )
        )
    for side, name in ((layer.before, "in"), (layer.after, "out")):
        title = f"|correlation|, {name}: mean {number(side.mean_absolute_correlation)}"
        image = matrix_img(side.correlation, title=title)
        parts.append(f"<figure>{image}<figcaption>{escape(title)}</figcaption></figure>")
    details = (
        f"{layer.num_channels} channels, κ {_number(layer.before.condition_number)} → "
        f"{_number(layer.after.condition_number)}, effective rank {number(layer.before.effective_rank)}"
    )
    return (
        f"<details{' open' if opened else ''}><summary><code>{escape(layer.name or '(model)')}</code> "
        f"{escape(layer.operation)}<span class='details'>{escape(details)}</span></summary>"
        f'<div class="panel">{"".join(parts)}</div></details>'
    )
