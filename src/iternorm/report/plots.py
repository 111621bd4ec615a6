"""Small plots for pages of a hundred layers: a few hundred bytes of SVG a curve, a few kilobytes of PNG a matrix.

Matplotlib's figures (see `report.figure_svg`) are a hundred times larger and slower to draw.
"""

import base64
import math
import struct
import zlib
from collections.abc import Mapping, Sequence
from html import escape

# Okabe and Ito's palette, which readers with a colour deficiency can tell apart; then grey.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#5b6675")

Points = Sequence[tuple[float, float]]


def line_svg(
    series: Mapping[str, Points],
    *,
    title: str,
    x_label: str,
    y_label: str,
    x_log: bool = False,
    y_log: bool = False,
    width: int = 440,
    height: int = 250,
    markers: bool = False,
    errors: Mapping[str, Sequence[float]] | None = None,
    x_ticks: Sequence[float] | None = None,
    x_names: Mapping[float, str] | None = None,
    colors: Mapping[str, str] | None = None,
) -> str:
    """Curves over common axes as an SVG element.

    Infinite values are dots on a line of their own above the others. Points that are not numbers, or not positive on a
    logarithmic axis, are left out. The curve has a gap at both.

    Args:
        series: Points (x, y) of each curve by its name, which stands in the legend.
        title: What is shown; also the text for those who cannot see it.
        x_label: Below the axis.
        y_label: Above the axis.
        x_log: Logarithmic x.
        y_log: Logarithmic y.
        width: In pixels, before the page scales it.
        height: In pixels, without the room that names take below the axis.
        markers: Draw each point as a dot.
        errors: Half lengths of error bars, one for each point of a curve.
        x_ticks: Where to put ticks on x, instead of round values; the axis reaches over all of them.
        x_names: Names of all values of x, which stand at the ticks in place of the values. Hovering over a point shows
            its name and value.
        colors: Of the curves by name, instead of those of `COLORS` in their order.
    """
    kept = {
        name: [(x, y) for x, y in points if _drawable(x, x_log) and _drawable(y, y_log)]
        for name, points in series.items()
    }
    infinite = {
        name: [x for x, y in points if _drawable(x, x_log) and y == math.inf] for name, points in series.items()
    }
    xs = [x for name, points in kept.items() for x in (*(x for x, _ in points), *infinite[name])]
    ys = [y for points in kept.values() for _, y in points]
    bars = {
        name: [
            (x, y - half, y + half)
            for (x, y), half in zip(series[name], halves, strict=False)
            if _drawable(x, x_log) and _drawable(y - half, y_log) and _drawable(y + half, y_log)
        ]
        for name, halves in (errors or {}).items()
    }
    ys += [end for drawn in bars.values() for _, *ends in drawn for end in ends]
    if not xs:
        return f'<p class="empty">{escape(title)}: nothing to draw.</p>'
    legend = [name for name in kept if kept[name] or infinite[name]]
    colors = colors or {name: COLORS[index % len(COLORS)] for index, name in enumerate(legend)}
    rows = _legend_rows(legend, width - 60)
    names = {x: _cut(name) for x, name in (x_names or {}).items()}
    room = _Slope(max(map(len, names.values()), default=0))
    left, right, top = max(52, room.across), 10, 40 + 15 * len(rows)
    bottom = height - 34
    height += room.down
    shown = [*xs, *(x_ticks or ())]
    x_scale = _Scale(min(shown), max(shown), x_log, left, width - right)
    # Infinity has the uppermost line.
    y_scale = _Scale(min(ys, default=1), max(ys, default=1), y_log, bottom, top + (18 if any(infinite.values()) else 0))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="{escape(title)}" style="max-width: {width}px" font-size="11" fill="#1c2430">',
        f'<text x="4" y="14" font-size="12" font-weight="600">{escape(title)}</text>',
    ]
    for row, entries in enumerate(rows):
        x = left
        for name in entries:
            color = colors[name]
            y = 30 + 15 * row
            parts.append(f'<path d="M{x} {y - 4}h14" stroke="{color}" stroke-width="2"/>')
            parts.append(f'<text x="{x + 18}" y="{y}">{escape(name)}</text>')
            x += _legend_width(name)
    levels = [(y_scale(value), text) for value, text in y_scale.ticks()] if ys else []
    if any(infinite.values()):
        levels.append((top, "∞"))
    for y, text in levels:
        size = ' font-size="15"' if text == "∞" else ""
        parts.append(f'<path d="M{left} {y:.1f}H{width - right}" stroke="#e3e7ec"/>')
        parts.append(f'<text x="{left - 5}" y="{y + 4:.1f}" text-anchor="end" fill="#5b6675"{size}>{text}</text>')
    for value, text in x_scale.ticks() if x_ticks is None else [(x, _tick_text(x)) for x in x_ticks]:
        x = x_scale(value)
        parts.append(f'<path d="M{x:.1f} {bottom}v4" stroke="#5b6675"/>')
        parts.append(room.label(x, bottom, names.get(value, text)))
    parts.append(f'<path d="M{left} {bottom}H{width - right}" stroke="#5b6675"/>')
    middle = (left + width - right) / 2
    if x_label:
        place = f'x="{middle}" y="{height - 4}" text-anchor="middle"'
        parts.append(f'<text {place} fill="#5b6675">{escape(x_label)}</text>')
    if y_label:
        parts.append(f'<text x="4" y="{top - 8}" fill="#5b6675">{escape(y_label)}</text>')
    for index, name in enumerate(legend):
        color = colors[name]
        points = [(x_scale(x), y_scale(y)) for x, y in kept[name]]
        path = ""
        for x, y in series[name]:
            if not (_drawable(x, x_log) and _drawable(y, y_log)):
                path += " "
                continue
            place = f"{x_scale(x):.1f} {y_scale(y):.1f}"
            # A line of zero length has round ends, so it shows a point between two gaps.
            path += f"L{place}" if path.strip() and path[-1] != " " else f"M{place}h0"
        shape = 'fill="none" stroke-width="1.6" stroke-linejoin="round" stroke-linecap="round"'
        parts.append(f'<path d="{path}" stroke="{color}" {shape}/>')
        # Side by side, or the last curve's dots would hide the others'.
        above = [(x_scale(x) + 5 * (index - (len(legend) - 1) / 2), float(top)) for x in infinite[name]]
        if dotted := above + (points if markers or len(points) == 1 else []):
            dots = "".join(f"M{x:.1f} {y:.1f}h0" for x, y in dotted)
            parts.append(f'<path d="{dots}" stroke="{color}" stroke-width="5" stroke-linecap="round"/>')
        for x, low, high in bars.get(name, ()):
            bar = f"M{x_scale(x):.1f} {y_scale(low):.1f}V{y_scale(high):.1f}"
            parts.append(f'<path d="{bar}" stroke="{color}"/>')
        if x_names is not None:
            places = [*zip(kept[name], points, strict=True)]
            places += [((x, math.inf), place) for x, place in zip(infinite[name], above, strict=True)]
            # Invisible and larger than the dot, so that it is easy to hover over.
            parts += [
                f'<circle cx="{px:.1f}" cy="{py:.1f}" r="6" fill="none" pointer-events="all">'
                f"<title>{escape(x_names[x])}: {_value_text(y)} ({escape(name)})</title></circle>"
                for (x, y), (px, py) in places
            ]
    return "".join([*parts, "</svg>"])


def matrix_img(matrix: Sequence[Sequence[float]], *, title: str, pixels: int = 170) -> str:
    """A square matrix of values in [0, 1] as an image element, white for 0 and dark for 1."""
    rows = b"".join(b"\0" + bytes(255 - round(255 * min(1.0, max(0.0, value))) for value in row) for row in matrix)
    size = struct.pack(">II", len(matrix[0]), len(matrix))
    # 8 bits of grey, no interlacing; a filter byte of 0 stands before each row.
    chunks = [(b"IHDR", size + b"\x08\x00\x00\x00\x00"), (b"IDAT", zlib.compress(rows, 9)), (b"IEND", b"")]
    png = b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )
    address = "data:image/png;base64," + base64.b64encode(png).decode()
    return (
        f'<img src="{address}" alt="{escape(title)}" width="{pixels}" height="{pixels}" '
        'style="image-rendering: pixelated; border: 1px solid #d9dee5">'
    )


class _Slope:
    """Texts below an axis: short ones are horizontal, long ones slope up to their tick and need more room."""

    def __init__(self, longest: int):
        """Room for names of up to so many letters, at 6.5 pixels a letter and 50 degrees."""
        self.sloping = longest > 4
        self.across = round(6.5 * longest * 0.64) + 6 if self.sloping else 0
        self.down = round(6.5 * longest * 0.77) if self.sloping else 0

    def label(self, x: float, bottom: int, text: str) -> str:
        """A text at a tick."""
        y = bottom + (12 if self.sloping else 16)
        turn = f'transform="rotate(-50 {x:.1f} {y})" text-anchor="end"' if self.sloping else 'text-anchor="middle"'
        return f'<text x="{x:.1f}" y="{y}" {turn} fill="#5b6675">{escape(text)}</text>'


def _cut(name: str, longest: int = 24) -> str:
    """The name, shortened if it is too long. The end of a layer's name says more than its beginning."""
    return name if len(name) <= longest else "…" + name[1 - longest :]


def _drawable(value: float, logarithmic: bool) -> bool:
    return math.isfinite(value) and (value > 0 or not logarithmic)


def _legend_width(name: str) -> int:
    return 30 + round(6.2 * len(name))


def _legend_rows(names: Sequence[str], width: int) -> list[list[str]]:
    rows: list[list[str]] = [[]]
    used = 0
    for name in names:
        if rows[-1] and used + _legend_width(name) > width:
            rows.append([])
            used = 0
        rows[-1].append(name)
        used += _legend_width(name)
    return rows


class _Scale:
    """Values to pixels, linear or logarithmic, with round ticks."""

    def __init__(self, low: float, high: float, logarithmic: bool, start: float, stop: float):
        self.logarithmic = logarithmic
        self.start, self.stop = start, stop
        low, high = (math.log10(low), math.log10(high)) if logarithmic else (low, high)
        if high - low < 1e-9 * max(1.0, abs(high)):
            low, high = low - 0.5, high + 0.5
        self.low, self.high = low, high

    def __call__(self, value: float) -> float:
        position = math.log10(value) if self.logarithmic else value
        return self.start + (position - self.low) / (self.high - self.low) * (self.stop - self.start)

    def ticks(self) -> list[tuple[float, str]]:
        """Values and their texts: decades or 1-2-5 steps, at most about six."""
        if self.logarithmic and self.high - self.low >= 0.5:
            step = max(1, math.ceil((self.high - self.low) / 6))
            factors = (1, 2, 5) if self.high - self.low < 2 else (1,)
            exponents = range(math.floor(self.low), math.floor(self.high + 1e-9) + 1, step)
            values = [factor * 10.0**exponent for exponent in exponents for factor in factors]
            low, high = self.low - 1e-9, self.high + 1e-9
            return [(value, _tick_text(value)) for value in values if low <= math.log10(value) <= high]
        low, high = (10**self.low, 10**self.high) if self.logarithmic else (self.low, self.high)
        raw = (high - low) / 5
        power = 10 ** math.floor(math.log10(raw))
        step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw * 0.999)
        first = math.ceil(low / step - 1e-9)
        last = math.floor(high / step + 1e-9)
        return [(k * step, _tick_text(k * step)) for k in range(first, last + 1)]


def _value_text(value: float) -> str:
    return "∞" if value == math.inf else f"{value:.3g}"


def _tick_text(value: float) -> str:
    if value == 0 or 1e-3 <= abs(value) < 1e5:
        return f"{value:g}"
    return f"{value:.0e}".replace("e-0", "e-").replace("e+0", "e")
