"""The page of an analysis, also in a real browser."""

import json
import re
import shutil
import subprocess
import xml.etree.ElementTree as ElementTree
from html import unescape

import pytest
import torch
from torch import nn

from iternorm.analysis import analyze
from iternorm.analysis.plots import line_svg, matrix_img
from page_checks import assert_self_contained

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
    const box = text.getBBox(), view = text.ownerSVGElement.viewBox.baseVal;
    return box.x < -1 || box.x + box.width > view.width + 1 || box.y + box.height > view.height + 1;
  }).map((text) => text.textContent),
});
</script>"""


def deep(num_layers):
    torch.manual_seed(0)
    blocks = [module for _ in range(num_layers) for module in (nn.Linear(12, 12), nn.BatchNorm1d(12), nn.ReLU())]
    return nn.Sequential(nn.Sequential(*blocks))


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


def test_names_are_escaped():
    model = nn.Module()
    model.add_module("<b>&", nn.BatchNorm1d(3))
    result = analyze(model, [torch.randn(8, 3)], batch_sizes=(), forward=lambda model, x: model._modules["<b>&"](x))
    assert "<b>&" not in result.to_html()
    assert "&lt;b&gt;&amp;" in result.to_html()


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium is installed")
@pytest.mark.parametrize("width", [1400, 420])
def test_page_in_a_browser(hundred, tmp_path, width):
    path = tmp_path / "page.html"
    path.write_text(hundred.to_html().replace("</body>", MEASURE + "</body>"), encoding="utf-8")
    command = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    command += [f"--window-size={width},1000", "--dump-dom", path.as_uri()]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    measured = json.loads(unescape(re.search(r"<title>(.*?)</title>", finished.stdout, re.DOTALL)[1]))
    assert measured == {"details": 100, "plots": 204, "images": 200, "overflow": 0, "cramped": []}


class TestPlots:
    def test_curves_are_drawn_inside_the_axes_with_gaps(self):
        points = [(1, 10.0), (2, 100.0), (3, float("inf")), (4, 1000.0), (5, 0.0)]
        svg = line_svg({"a & b": points}, title="<t>", x_label="x", y_label="y", y_log=True)
        tree = ElementTree.fromstring(svg)
        path = next(element.get("d") for element in tree.iter() if element.get("stroke-width") == "1.6")
        assert path.count("M") == 2
        assert path.count("L") == 1
        coordinates = [float(value) for value in re.findall(r"[\d.]+", path.replace("h0", ""))]
        # Decades are evenly spaced: the middle of three lies in the middle.
        top, middle, bottom = coordinates[5], coordinates[3], coordinates[1]
        assert middle == pytest.approx((top + bottom) / 2, abs=0.1)
        texts = [element.text for element in tree.iter() if element.text]
        assert {"<t>", "a & b", "10", "100", "1000"} <= set(texts)

    def test_nothing_to_draw_is_said(self):
        assert "nothing to draw" in line_svg({"a": [(1, float("nan"))]}, title="t", x_label="", y_label="")

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
