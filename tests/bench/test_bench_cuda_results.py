"""What is made of the GPU's figures: the targets, a whole run, the tables, and the README's."""

import json

import pytest
from fake_gpu import TINY, FakeGpu, tiny_candidates, tiny_vgg

from iternorm.bench import gpu as cuda
from iternorm.bench.gpu import targets
from iternorm.timing.gpu import cases, comparison, training
from iternorm.timing.gpu.cases import STEM, TABLE_A1


def synthetic(ours=1.0, network=1.0):
    """A result with all that the targets look at: everything takes 1 ms except what is given."""
    found = {"cases": [], "training": []}
    for shape in (*TABLE_A1, STEM):
        for dtype in targets.DTYPES:
            names = ["conv3x3", "BatchNorm2d", "BatchNorm2d compiled", "IterNorm T=5 d=64", "IterNorm T=5 d=64 exact"]
            rows = []
            for name in names:
                for layout in cases.LAYOUTS:
                    time = ours if name.startswith("IterNorm") else 1.0
                    rows.append({"name": name, "layout": layout, "graph_ms": time, "eager_ms": time})
            comparison.add_ratios(rows, 1.0, 1)
            found["cases"].append({"shape": list(shape), "dtype": dtype, "floor_ms": 1.0, "rivals": rows})
    for dtype in targets.DTYPES:
        row = {"name": "IterNorm d=64", "ratio_to_batch_norm": network, "memory_ratio_to_batch_norm": network}
        found["training"].append({"dtype": dtype, "networks": [row]})
    return found


def row_in(result, shape, dtype, name, layout):
    (case,) = (case for case in result["cases"] if (case["shape"], case["dtype"]) == (list(shape), dtype))
    (row,) = (row for row in case["rivals"] if (row["name"], row["layout"]) == (name, layout))
    return row


def test_targets_are_those_of_the_table():
    limits = {}
    for target in targets.evaluate(synthetic()):
        limits.setdefault(target["target"].replace("64x128", "64x64").replace("NHWC,", "NCHW,"), []).append(
            (target["dtype"], target["limit"])
        )
    assert {name: sorted(set(pairs)) for name, pairs in limits.items()} == {
        "256x64x112x112, best layout / eight-pass floor": [("bfloat16", 1.4), ("float32", 1.25)],
        "256x64x112x112, best layout / best BatchNorm": [("bfloat16", 1.1), ("float32", 1.15)],
        "64x64x32x32 NCHW, graph / BatchNorm NCHW, graph": [("bfloat16", 1.0), ("float32", 1.0)],
        "64x64x32x32 NCHW, graph / conv3x3, same layout, graph": [("bfloat16", 0.8), ("float32", 0.5)],
        "64x64x32x32 NCHW, eager / BatchNorm eager": [("bfloat16", 1.5), ("float32", 1.5)],
        "64x64x32x32, exact fp32 / TF32 allowed, worse layout": [("float32", 1.5)],
        "256x64x112x112, exact fp32 / TF32 allowed, worse layout": [("float32", 1.5)],
        "VGG training step / BatchNorm": [("bfloat16", 1.25), ("float32", 1.25)],
        "VGG peak memory / BatchNorm": [("bfloat16", 1.05), ("float32", 1.05)],
    }


def test_targets_are_met_at_their_limit_and_not_beyond_it():
    assert all(target["met"] is True for target in targets.evaluate(synthetic(ours=0.5, network=1.05)))
    missed = [target["target"] for target in targets.evaluate(synthetic(ours=2.0, network=1.06)) if not target["met"]]
    assert sum("memory" in name for name in missed) == 2
    assert not any("training step" in name or "exact" in name for name in missed)
    assert sum("64x" in name for name in missed) == 24 + 4


def test_the_stem_is_judged_in_its_best_layout_against_the_best_batch_norm():
    result = synthetic()
    row_in(result, STEM, "float32", "IterNorm T=5 d=64", "NHWC")["graph_ms"] = 0.6
    row_in(result, STEM, "float32", "BatchNorm2d compiled", "NCHW")["graph_ms"] = 0.4
    row_in(result, STEM, "float32", "BatchNorm2d", "NHWC")["graph_ms"] = None
    found = {(t["target"], t["dtype"]): t for t in targets.evaluate(result)}
    assert found["256x64x112x112, best layout / eight-pass floor", "float32"]["measured"] == 0.6
    against = found["256x64x112x112, best layout / best BatchNorm", "float32"]
    assert against["measured"] == pytest.approx(1.5)
    assert against["met"] is False


def test_exact_fp32_is_judged_in_its_worse_layout():
    result = synthetic()
    row_in(result, STEM, "float32", "IterNorm T=5 d=64 exact", "NHWC")["graph_ms"] = 2.0
    found = {t["target"]: t for t in targets.evaluate(result)}
    assert found["256x64x112x112, exact fp32 / TF32 allowed, worse layout"]["measured"] == 2.0


def test_a_target_without_figures_is_not_met():
    found = targets.evaluate({"cases": [], "training": []})
    assert len(found) == len(targets.evaluate(synthetic()))
    assert all(target["measured"] is target["met"] is None for target in found)


def test_a_quick_run_has_few_rounds(monkeypatch):
    monkeypatch.setattr(cuda, "run_setting", lambda setting, norms, gpu, rounds: {"dtype": "", "networks": []})
    found = cuda.run(rounds=15, quick=True, shapes=[TINY], candidates=tiny_candidates, gpu=FakeGpu())
    assert len(found["cases"][0]["rivals"][0]["graph_samples_ms"]) == found["settings"]["rounds"] == 5


@pytest.fixture(scope="module")
def result():
    """A whole run on tiny activations."""
    parts, saved = [], []
    real = training.run_setting
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "BATCH_SIZE", 16)
        patch.setattr(cuda, "run_setting", lambda *arguments: real(*arguments, network=tiny_vgg))
        found = cuda.run(
            rounds=2,
            shapes=[TINY, (4, 8, 2, 2)],
            candidates=tiny_candidates,
            gpu=FakeGpu(),
            progress=parts.append,
            save=lambda so_far: saved.append(json.loads(json.dumps(so_far))),
        )
    assert parts[:3] == ["compilation", "copy bandwidth", "6x8x4x4 float32"]
    assert parts[-1] == "VGG bfloat16 NHWC"
    assert len(parts) == 2 + 4 + 3
    # What there is at each point is whole: a run that is cut short leaves it.
    assert [len(each["cases"]) + len(each["training"]) for each in saved] == [1, 2, 3, 4, 5, 6, 7]
    assert {len(each["targets"]) for each in saved} == {len(found["targets"])}
    assert saved[-1] == found
    return found


def test_a_run_is_json_with_provenance_settings_and_targets(result):
    assert json.loads(json.dumps(result)) == result
    assert result["provenance"]["device"] == "cpu"
    assert result["settings"]["copy_gb_per_s"] == 4000
    assert result["settings"]["rounds"] == 2
    assert [case["dtype"] for case in result["cases"]] == ["float32", "bfloat16"] * 2
    assert [setting["layout"] for setting in result["training"]] == ["NCHW", "NHWC", "NHWC"]
    # VGG's two figures in two precisions; no other target has its activation here.
    assert sum(target["met"] is not None for target in result["targets"]) == 4
    assert cuda.count_parts() == 2 + 6 * 2 + 3


def test_the_printed_lines_show_every_row_and_every_failure(result):
    text = "\n".join(cuda.lines(result))
    for phrase in (
        "6x8x4x4 float32",
        "IterNorm T=5 d=64 exact",
        "no CUDA graph: 6x8x4x4 float32 NCHW DBN d=16: it waits",
    ):
        assert phrase in text
    assert "Targets: 4 of " in text
    assert "not measured" in text
    assert text.count("VGG training step, batch 16") == 3
    failed = json.loads(json.dumps(result))
    failed["cases"][0]["rivals"][0]["failed"] = "E: conv"
    failed["cases"][1]["failed"] = "E: case"
    failed["training"][1]["networks"][0]["failed"] = "E: net"
    failed["settings"]["precompiled"] = {"processes": 2, "jobs": 3, "seconds": 1.0, "failed": ["E: job"]}
    text = "\n".join(cuda.lines(failed))
    assert all(f"E: {what}" in text for what in ("conv", "case", "net", "job"))


def test_markdown_has_a_line_a_case_and_a_network(result):
    lines = cuda.markdown(result).splitlines()
    table = [line for line in lines if line.startswith("|")]
    assert len(table) == 2 + 4 + 2 + 5
    widths = [line.count("|") for line in table]
    assert set(widths[:6]) == {11}
    assert set(widths[6:]) == {12}
    assert table[2].startswith("| 6x8x4x4 fp32 | ")
    assert "| 1000 / 1000 |" in table[2]
    assert "DBN d=16" in table[-2]
    assert "1366" in table[-2]
    rows = cuda.markdown_targets(result).splitlines()
    assert len(rows) == 2 + len(result["targets"])


def test_markers_are_replaced_and_must_exist():
    document = "a\n<!-- bench:x -->\nold\n<!-- /bench -->\nb\n<!-- bench:y -->\n<!-- /bench -->\n"
    replaced = cuda.put_between_markers(document, "x", "new")
    assert replaced == document.replace("old", "\nnew\n")
    assert cuda.put_between_markers(replaced, "x", "new") == replaced
    with pytest.raises(ValueError, match="bench:z"):
        cuda.put_between_markers(document, "z", "new")


def test_the_default_precision_comes_first_and_tf32_beside_it(result):
    case = synthetic()["cases"][0]
    for row in case["rivals"]:
        if row["name"] == "IterNorm T=5 d=64":
            row["graph_ms"], row["eager_ms"] = 0.5, 0.25
    half_precision = [row for row in case["rivals"] if not row["name"].endswith("exact")]
    both = [case, {**case, "dtype": "bfloat16", "rivals": half_precision}]
    table = [line for line in cuda.markdown({**result, "cases": both}).splitlines() if line.startswith("|")]
    head, _, single, half = ([cell.strip() for cell in line.strip("|").split("|")] for line in table[:4])
    assert dict(zip(head[4:], single[4:], strict=True))["eager IterNorm"] == "1000 / 1000"
    assert single[4:8] == ["1000 / 1000", "1.00", "500 / 500", "0.50"]
    # Half precision has one kind only.
    assert half[4:8] == ["500 / 500", "0.50", "–", "–"]
