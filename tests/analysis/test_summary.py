"""The result of `analyze` as JSON and as a table."""

import json

import pytest
import torch
from analyzed import images, network
from torch import nn

from iternorm.analysis import analyze


@pytest.fixture(scope="module")
def result():
    return analyze(network(), images(), batch_sizes=(4, 16))


class TestSummary:
    def test_json_is_strict_and_complete(self, result, tmp_path):
        text = result.to_json(tmp_path / "a" / "analysis.json")
        assert (tmp_path / "a" / "analysis.json").read_text() == text + "\n"
        content = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
        assert content["format"] == "iternorm-analysis-1"
        assert [layer["name"] for layer in content["layers"]] == ["1", "5", "8", "9"]
        # LayerNorm's output lies in a plane: the infinite condition number is null.
        assert content["layers"][3]["after"]["condition_number"] is None
        assert [n["batch_size"] for n in content["layers"][0]["noise"]] == [4, 16]

    def test_table_has_a_line_a_layer(self, result):
        lines = result.table().splitlines()
        assert lines[0].split()[:3] == ["layer", "operation", "channels"]
        assert lines[0].endswith("SND B=4  SND B=16  drift")
        assert [line.split()[0] for line in lines[2:6]] == ["1", "5", "8", "9"]
        assert "IterNorm T=3 d=64" in result.table()
        assert "SND at B=4" in result.table(batch_size=4)

    def test_alternatives_are_shown_at_the_largest_batch_size(self, result):
        assert "SND at B=16" in result.table()
        assert result.alternative_rows() == result.alternative_rows(16) != result.alternative_rows(4)

    def test_table_says_where_estimates_fall_short(self, result):
        assert "SND at B=16 is too small by about 29%: only 32 examples" in result.table()
        three_quarters = analyze(network(), images(), layers=["1"], batch_sizes=(24,))
        assert "SND at B=24 is too small by about 50%: only 32 examples" in three_quarters.table()
        for count in (8, 9):
            few = analyze(nn.Sequential(nn.BatchNorm1d(9)), [torch.randn(count, 9)], batch_sizes=())
            assert "no more samples than channels" in few.table()
