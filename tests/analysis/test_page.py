"""The page of an analysis, also in a real browser."""

import json
import re
import shutil
import subprocess
import xml.etree.ElementTree as ET
from collections import OrderedDict
from html import unescape

import pytest
import torch
from page_checks import assert_self_contained
from torch import nn

import iternorm
from iternorm.analysis import analyze
from iternorm.report.palette import color_of
from iternorm.report.plots import line_svg, matrix_img

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

# What the browser made of the page, left in the title, where --dump-dom shows it.
MEASURE = """<script>
const all = (selector) => [...document.querySelectorAll(selector)];
all("details").forEach((element) => { element.open = true; });
document.title = JSON.stringify({
  details: all("details").length,
  plots: all("svg").filter((svg) => svg.getBoundingClientRect().height > 100).length,
  images: all("img").filter((image) => image.complete && image.naturalWidth > 0).length,
  overflow: document.documentElement.scrollWidth - document.documentElement.clientWidth,
  cramped: all("svg text").filter((text) => {
    const box = text.getBoundingClientRect(), view = text.ownerSVGElement.getBoundingClientRect();
    return box.left < view.left - 1 || box.right > view.right + 1 || box.bottom > view.bottom + 1;
  }).map((text) => text.textContent),
  title: all("h1").filter((title) => title.scrollWidth > title.clientWidth).length,
});
</script>"""


class ClassificationNetworkWithANameThatIsLongerThanAPhoneIsWide(nn.Sequential):
    """The page is called after it."""


def deep(num_layers):
    torch.manual_seed(0)
    blocks = [module for _ in range(num_layers) for module in (nn.Linear(12, 12), nn.BatchNorm1d(12), nn.ReLU())]
    return ClassificationNetworkWithANameThatIsLongerThanAPhoneIsWide(
        OrderedDict(backbone=nn.Sequential(OrderedDict(a_stage_of_blocks=nn.Sequential(*blocks))))
    )


@pytest.fixture(scope="module")
def hundred():
    batches = [torch.randn(40, 12, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    return analyze(deep(100), batches, batch_sizes=(4, 16), draws=10)


def test_page_is_self_contained(hundred, tmp_path):
    page = hundred.to_html(tmp_path / "page.html")
    assert (tmp_path / "page.html").read_text(encoding="utf-8") == page
    assert_self_contained(page)


def test_a_hundred_layers_are_folded_and_small(hundred):
    page = hundred.to_html()
    assert page.count("<details>") == 100
    assert "<details open>" not in page
    assert len(page) < 1_500_000
    # Two panels for each layer, and the four curves over depth.
    assert page.count("<svg") == 204
    assert page.count("<img") == 200


def test_few_layers_are_open():
    page = analyze(deep(2), [torch.randn(40, 12)], batch_sizes=()).to_html()
    assert page.count("<details open>") == 2
    assert "What other normalizations would do" not in page


def depth_plots(page):
    """The plots over depth, each as a tree."""
    return [ET.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", page.partition("<h2>Layers")[0])]


def test_plots_over_depth_name_layers_as_tables_do():
    model = nn.Sequential(nn.Linear(12, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 12), nn.BatchNorm1d(12))
    page = analyze(model, [torch.randn(40, 12)], batch_sizes=(8,), draws=10).to_html()
    for plot in depth_plots(page):
        texts = texts_of(plot, "text")
        assert {"1", "4"} <= set(texts)
        assert "2" not in texts
        # What a pointer that rests on a point is told.
        named = texts_of(plot, "title")
        assert {name.partition(":")[0] for name in named} == {"1", "4"}


def texts_of(tree, tag):
    """The texts of the elements of a kind; a drawing has none without one."""
    return [element.text or "" for element in tree.iter() if element.tag.endswith(tag)]


def test_of_many_layers_some_are_named_and_a_pointer_tells_all(hundred):
    plot = depth_plots(hundred.to_html())[0]
    names = [layer.name for layer in hundred.layers]
    texts = texts_of(plot, "text")
    shown = [text for text in texts if text.startswith("…")]
    assert 5 <= len(shown) <= 14
    assert all(any(name.endswith(text[1:]) for name in names) for text in shown)
    named = {text.partition(":")[0] for text in texts_of(plot, "title")}
    assert named == set(names)


def test_a_long_name_is_cut_at_its_beginning():
    svg = line_svg(
        {"a": [(1, 1.0), (2, 2.0)]}, title="t", x_label="", y_label="", x_names={1: "x" * 80 + ".bn", 2: "y"}
    )
    texts = texts_of(ET.fromstring(svg), "text")
    (cut,) = [text for text in texts if text.endswith(".bn")]
    assert cut.startswith("…x")
    assert len(cut) <= 24


@pytest.fixture(scope="module")
def flat():
    """A model whose second layer sees two channels that are one."""
    torch.manual_seed(0)
    linear = nn.Linear(4, 4)
    model = nn.Sequential(nn.BatchNorm1d(4), linear, nn.BatchNorm1d(4))
    with torch.no_grad():
        linear.weight[1] = linear.weight[0]
        linear.bias[1] = linear.bias[0]
    return analyze(model, [torch.randn(40, 4) for _ in range(2)], batch_sizes=())


def test_an_infinite_condition_number_is_drawn_and_explained(flat):
    assert [layer.before.condition_number == float("inf") for layer in flat.layers] == [False, True]
    note = "κ is infinite where a direction of the channels has no variance: 2"
    assert note in flat.notes()
    page = flat.to_html()
    assert note in page
    assert "not drawn" not in page
    assert re.search(r"\binf\b", re.sub(r"base64,[^\"]*", "", page)) is None
    assert '<td class="number">∞</td>' in page
    assert "κ ∞ → ∞" in page
    plot = depth_plots(page)[0]
    height = float(next(e.attrib["y"] for e in plot.iter() if e.text == "∞"))
    # Above all that is finite.
    ticks = [float(e.attrib["y"]) for e in plot.iter() if e.get("text-anchor") == "end" and e.text != "∞"]
    assert all(height < tick for tick in ticks)
    assert sum("∞" in (e.text or "") for e in plot.iter() if e.tag.endswith("title")) == 2


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium is installed")
def test_notes_with_long_names_stay_on_a_narrow_page(tmp_path):
    model = deep(1)
    # A channel without variance: a note names the layer.
    model.get_parameter("backbone.a_stage_of_blocks.0.weight").data[0] = 0
    name = "a_module_with_a_name_that_is_longer_than_a_phone_is_wide"
    wrapped = nn.Sequential(OrderedDict({name: model}))
    result = analyze(wrapped, [torch.randn(40, 12, generator=torch.Generator().manual_seed(0))], batch_sizes=())
    assert name in "".join(result.notes())
    assert measured_in_a_browser(result, tmp_path, 420)["overflow"] == 0


def test_infinity_is_not_explained_where_there_is_none():
    found = analyze(nn.Sequential(nn.BatchNorm1d(3)), [torch.randn(40, 3)], batch_sizes=())
    assert not any("infinite" in note for note in found.notes())


def test_names_are_escaped():
    model, layer = nn.Module(), nn.BatchNorm1d(3)
    model.add_module("<b>&", layer)
    result = analyze(model, [torch.randn(8, 3)], batch_sizes=(), forward=lambda model, x: layer(x))
    assert "<b>&" not in result.to_html()
    assert "&lt;b&gt;&amp;" in result.to_html()


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium is installed")
@pytest.mark.parametrize("width", [1400, 420])
def test_page_in_a_browser(hundred, tmp_path, width):
    measured = measured_in_a_browser(hundred, tmp_path, width)
    assert measured == {"details": 100, "plots": 204, "images": 200, "overflow": 0, "cramped": [], "title": 0}


def measured_in_a_browser(analysis, tmp_path, width):
    path = tmp_path / "page.html"
    path.write_text(analysis.to_html().replace("</body>", MEASURE + "</body>"), encoding="utf-8")
    command = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    command += [f"--window-size={width},1000", "--dump-dom", path.as_uri()]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return json.loads(unescape(re.search(r"<title>(.*?)</title>", finished.stdout, re.DOTALL)[1]))


class TestPlots:
    def test_curves_are_drawn_inside_the_axes_with_gaps(self):
        points = [(1, 10.0), (2, 100.0), (3, float("inf")), (4, 1000.0), (5, 0.0)]
        svg = line_svg({"a & b": points}, title="<t>", x_label="x", y_label="y", y_log=True)
        tree = ET.fromstring(svg)
        path = next(element.get("d") for element in tree.iter() if element.get("stroke-width") == "1.6")
        assert path.count("M") == 2
        assert path.count("L") == 1
        coordinates = [float(value) for value in re.findall(r"[\d.]+", path.replace("h0", ""))]
        # Decades are evenly spaced: the middle of three lies in the middle.
        top, middle, bottom = coordinates[5], coordinates[3], coordinates[1]
        assert middle == pytest.approx((top + bottom) / 2, abs=0.1)
        texts = [element.text for element in tree.iter() if element.text]
        assert {"<t>", "a & b", "10", "100", "1000"} <= set(texts)

    def test_what_is_infinite_stands_above_the_rest(self):
        points = [(1, 10.0), (2, float("inf")), (3, 1000.0)]
        svg = line_svg({"a": points}, title="t", x_label="x", y_label="y", y_log=True)
        dots = re.search(r'<path d="(M[^"]*)" stroke="#0072b2" stroke-width="5"', svg)[1]
        (height,) = {float(value) for value in re.findall(r"M[\d.]+ ([\d.]+)h0", dots)}
        path = re.search(r'<path d="([^"]*)" stroke="#0072b2" fill="none"', svg)[1]
        assert all(height < float(value) for value in re.findall(r"M[\d.]+ ([\d.]+)h0", path))

    def test_nothing_but_infinity_is_drawn_too(self):
        svg = line_svg({"a": [(1, float("inf"))]}, title="t", x_label="x", y_label="y", y_log=True)
        assert "∞" in svg
        ET.fromstring(svg)

    def test_nothing_to_draw_is_said(self):
        assert "nothing to draw" in line_svg({"a": [(1, float("nan"))]}, title="t", x_label="", y_label="")

    @pytest.mark.parametrize("log", [False, True])
    def test_error_bars_stay_within_the_axes(self, log):
        # The last estimate has no place on a logarithmic axis.
        points, errors = [(8, 0.3), (32, 0.2), (64, 0.0)], [0.1, 0.15, 0.01]
        arguments = {"title": "t", "x_label": "", "y_label": "", "y_log": log}
        svg = line_svg({"a": points}, errors={"a": errors}, **arguments)
        bars = re.findall(r'<path d="M[\d.]+ ([-\d.]+)V([-\d.]+)" stroke="#0072b2"/>', svg)
        assert len(bars) == (2 if log else 3)
        top, bottom = 55, 216
        assert all(top <= float(end) <= bottom for bar in bars for end in bar)

    @pytest.mark.parametrize(("low", "high"), [(0, 0), (5, 5), (0.001, 0.0011), (-3, 70000), (1e-9, 1e9)])
    @pytest.mark.parametrize("log", [False, True])
    def test_every_range_has_ticks_within_the_plot(self, low, high, log):
        svg = line_svg({"a": [(1, low), (2, high)]}, title="t", x_label="", y_label="", y_log=log)
        heights = [
            float(value) for value in re.findall(r'text-anchor="end"|y="([\d.]+)" text-anchor="end"', svg) if value
        ]
        assert all(0 < height < 250 for height in heights)
        assert len(heights) >= 1 or "nothing to draw" in svg

    def test_matrix_is_a_png_with_its_values(self, tmp_path):
        import base64
        from io import BytesIO

        from PIL import Image

        matrix = [[1.0, 0.25, 0.0], [0.25, 1.0, 0.5], [0.0, 0.5, 1.0]]
        address = re.search(r'base64,([^"]+)"', matrix_img(matrix, title="t"))[1]
        image = Image.open(BytesIO(base64.b64decode(address)))
        assert image.size == (3, 3)
        assert [image.getpixel((column, 0)) for column in range(3)] == [0, 191, 255]


def test_a_norm_has_one_colour_in_all_panels():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), iternorm.DecorrelatedBatchNorm1d(4, group_size=2)
    )
    page = analyze(model, [torch.randn(40, 4) for _ in range(2)], batch_sizes=(4,), draws=10).to_html()
    # The legend: a short line in the curve's colour, and its name.
    panels = page[page.index("<h2>Layer by layer") :].split("<details")[1:]
    legends = [re.findall(r'h14" stroke="([^"]+)"[^>]*/><text[^>]*>([^<]+)', panel) for panel in panels]
    batch_norm, dbn = [{name: color for color, name in legend if name not in ("in", "out")} for legend in legends]
    assert batch_norm["BN"] == color_of("BN")
    # Those of all layers, and the layer's own where it is none of them.
    assert dbn == {**batch_norm, "DBN-2": dbn["DBN-2"]}
    assert len(set(dbn.values())) == len(dbn) == 6
