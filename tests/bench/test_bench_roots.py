"""The benchmark of roots, streams and samples: what is timed, what fails is said, targets, tables."""

import pytest
import torch
from fake_gpu import FakeGpu

from iternorm import bench, linalg
from iternorm.bench.gpu import roots as benchmark
from iternorm.timing.gpu import roots as timing


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(timing, "ROOTS", (((2, 6, 6), 2), ((2, 6, 6), 4)))
    monkeypatch.setattr(timing, "STREAMS", ((50, 4),))
    monkeypatch.setattr(timing, "LAYERS", ((2, 64, 3, 3),))
    monkeypatch.delenv(timing.FOREIGN, raising=False)


@pytest.fixture
def foreign(tmp_path, monkeypatch):
    """Packages with the names and signatures of the two that are measured against."""
    root = "def {}(x{}):\n    values, vectors = torch.linalg.eigh(x)\n"
    root = "import torch\n\n" + root + "    return (vectors * values.pow(-1 / {})[..., None, :]) @ vectors.mT\n"
    files = {
        "distributed_shampoo/preconditioner/matrix_functions.py": root.format(
            "matrix_inverse_root", ", root, config", "root"
        ),
        "distributed_shampoo/preconditioner/matrix_functions_types.py": "class CoupledNewtonConfig:\n    pass\n",
        "emerging_optimizers/legacy_soap/matrix_root_inverse_utils.py": root.format(
            "mat_root_inv_via_scaled_cans", "", "2"
        ),
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.replace("/ root", "/ float(root)"))
    monkeypatch.setenv(timing.FOREIGN, str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)


def test_everything_is_timed_and_judged(small):
    saved, done = [], []
    result = benchmark.run_roots(
        rounds=2, gpu=FakeGpu(), save=lambda r: saved.append(len(r["targets"])), progress=done.append
    )
    assert done[:3] == ["root 2 2x6x6", "root 4 2x6x6", "stream 50x4"]
    assert done[3:] == ["layer 2x64x3x3 float32", "layer 2x64x3x3 bfloat16"]
    assert saved == [1, 2, 3, 7, 11]
    for case in result["roots"]:
        assert [row["name"] for row in case["rows"]] == ["inverse_root", "torch.linalg.eigh"]
        assert all(len(row["samples_ms"]) == 2 and row["error"] < 1e-4 for row in case["rows"])
    assert all(row["failed"] is None and row["ratio"] == 1 for row in result["streams"][0]["rows"])
    text = "\n".join(benchmark.root_lines(result))
    assert "A^(-1/4), 2x6x6, condition number 1000" in text
    assert "| root 2 2x6x6, eigh / ours | 1.00 | at least 10.0 | no |" in benchmark.markdown_roots(result)
    limits = {target["target"]: target for target in result["targets"]}
    for name in ("GroupWhitening2d", "InstanceWhitening2d"):
        assert limits[f"2x64x3x3 bfloat16 NHWC, {name} / IterNorm2d"]["met"]
    # 50 x 4 floats at 4000 GB/s are no time at all.
    assert limits["stream 50x4, partial_fit / one read"]["met"] is False


def test_the_roots_of_others_are_timed_where_their_code_is(small, foreign):
    result = benchmark.run_roots(rounds=1, only=["root 2 2x6x6", "root 4 2x6x6"], gpu=FakeGpu())
    names = [[row["name"] for row in case["rows"]] for case in result["roots"]]
    assert names[0] == ["inverse_root", "torch.linalg.eigh", "Shampoo's Newton", "Emerging-Optimizers"]
    assert names[1] == names[0][:3]
    assert all(row["failed"] is None and row["error"] < 1e-4 for case in result["roots"] for row in case["rows"])
    assert "root 4 2x6x6, fastest of the others / ours" in [target["target"] for target in result["targets"]]


def test_what_fails_is_in_the_result_with_the_reason(small, monkeypatch):
    def broken(matrices, p):
        raise RuntimeError("no such root")

    monkeypatch.setattr(linalg, "inverse_root", broken)
    result = benchmark.run_roots(rounds=1, only=["root 2 2x6x6"], gpu=FakeGpu())
    row = result["roots"][0]["rows"][0]
    assert "no such root" in row["failed"]
    assert result["targets"][0]["met"] is None
    assert any("no such root" in line for line in benchmark.root_lines(result))


def test_the_matrices_have_the_condition_that_is_said():
    eigenvalues = torch.linalg.eigvalsh(timing.matrices_of((2, 16, 16), torch.device("cpu")).double())
    torch.testing.assert_close(
        eigenvalues[:, -1] / eigenvalues[:, 0], torch.full((2,), 1e3, dtype=torch.float64), rtol=1e-3, atol=0
    )


@pytest.mark.parametrize(
    ("device", "words", "text"),
    [("cpu", {}, "add --device cuda"), ("cuda", {"networks": True}, "--networks and --roots do not go together")],
)
def test_arguments_that_do_not_fit_are_refused(device, words, text):
    with pytest.raises(ValueError, match=text):
        bench.check_arguments(device, 3, roots=True, **words)
