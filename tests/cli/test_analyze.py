"""`iternorm analyze`: what it prints, what it writes, and how it fails."""

import json
import os
import subprocess
import sys

import pytest
import torch
from page_checks import assert_self_contained
from terminal import words

from iternorm.analysis import ModelAnalysis

MODELS = """
import torch
from torch import nn
import iternorm

def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 8),
                         iternorm.IterNorm1d(8))

def bare():
    return nn.Linear(64, 3)

def number():
    return 3

def rgb():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))

def half():
    return mlp().bfloat16()

def double():
    return mlp().double()

class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm2d(1)

    def forward(self, image, condition):
        return self.norm(image) + condition

instance = mlp()

def work():
    raise AssertionError("work before the arguments were checked")
"""


@pytest.fixture
def invoke(invoke, tmp_path):
    (tmp_path / "nets.py").write_text(MODELS)
    return invoke


def test_analyze_prints_a_table_and_writes_files(invoke, tmp_path):
    result = invoke(
        "analyze", "nets.py:mlp", "--data", "digits", "--examples", 200, "--snd", "16,4", "--json", "out/a.json",
        "--html", "out/a.html",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert "SND B=4  SND B=16" in lines[0]
    assert lines[2].split()[:2] == ["2", "BN"]
    assert "IterNorm T=7 d=64" in result.stdout
    content = json.loads((tmp_path / "out" / "a.json").read_text())
    assert [layer["name"] for layer in content["layers"]] == ["2", "5"]
    assert content["layers"][0]["num_examples"] == 200
    assert_self_contained((tmp_path / "out" / "a.html").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", ["half", "double"])
def test_a_model_of_another_dtype_than_the_data(invoke, name):
    result = invoke("analyze", f"nets.py:{name}", "--data", "digits", "--examples", 100, "--snd", "off")
    assert result.exit_code == 0, result.output
    assert [line.split()[0] for line in result.stdout.splitlines()[2:4]] == ["2", "5"]


def test_analyze_chosen_layers_without_noise(invoke):
    result = invoke("analyze", "nets.py:mlp", "--data", "digits", "--snd", "off", "--layer", "5", "--examples", 100)
    assert result.exit_code == 0, result.output
    assert "SND B=" not in result.stdout
    assert [line.split()[0] for line in result.stdout.splitlines()[2:3]] == ["5"]


def test_analyze_chosen_alternatives(invoke):
    result = invoke(
        "analyze", "nets.py:mlp", "--data", "digits", "--snd", "8", "--examples", 100,
        "--alternative", "DBN-4 pca", "--alternative", "IterNorm T=2",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "DBN-4 pca" in result.stdout
    assert "IterNorm T=2" in result.stdout
    assert "T=7" not in result.stdout


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["nets.py:number", "--data", "digits"], "returned a int"),
        (["nets.py:bare", "--data", "digits", "--flatten"], "no normalization layer"),
        (["nets.py:mlp", "--data", "nowhere"], "neither a data set"),
        (["nets.py:mlp", "--data", "digits", "--snd", "4096"], "saw only"),
        (["nets.py:mlp", "--data", "digits", "--snd", "1"], "batch_sizes holds 1"),
        (["nets.py:mlp", "--data", "digits", "--snd", "few"], "--snd is 'few'"),
        (["nets.py:mlp", "--data", "digits", "--batch-size", "1"], "batch 0 holds one example"),
        (["nets.py:mlp", "--data", "digits", "--layer", "bn"], "'bn'; normalization layers of the model are: 2, 5"),
        (["nets.py:mlp", "--data", "digits", "--alternative", "LN"], "no operation is called 'LN'"),
        (["nets.py:mlp", "--data", "digits", "--mode", "test"], "mode is 'test'"),
        (["nets.py:mlp", "--data", "digits", "--image-size", "0"], "image_size is 0, but 1 or more is needed"),
        (
            ["nets.py:rgb", "--data", "digits"],
            "fails on a batch of --data, (64, 1, 8, 8) in torch.float32: Given",
        ),
        (["nets.py:Pair", "--data", "digits"], "in torch.float32: Pair.forward() missing 1 required positional"),
    ],
)
def test_analyze_says_in_one_line_what_is_wrong(invoke, arguments, text):
    result = invoke("analyze", *arguments)
    assert result.exit_code == 2
    message = words(result.stderr)
    assert message.startswith("error: ")
    assert text in message


def test_analyze_takes_a_model_in_place_of_a_function(invoke):
    result = invoke("analyze", "nets.py:instance", "--data", "digits", "--snd", "off", "--examples", 100)
    assert result.exit_code == 0, result.output
    assert [line.split()[0] for line in result.stdout.splitlines()[2:4]] == ["2", "5"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "tpu"], "error: device='tpu' is not known to torch: use 'cpu' or 'cuda'\n"),
        (
            ["--json", "a.out", "--html", "./a.out"],
            "error: a.out is named twice, but each output needs a file of its own",
        ),
        (["--html", "nets.py/a.html"], "error: nets.py/a.html cannot be written: nets.py is not a folder: "),
        (["--json", "nets.py/x/a.json"], "error: nets.py/x/a.json cannot be written: nets.py is not a folder: "),
    ],
)
def test_what_cannot_end_well_is_said_before_any_work(invoke, tmp_path, arguments, message):
    before = sorted(tmp_path.iterdir())
    result = invoke("analyze", "nets.py:work", "--data", "digits", *arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith(message)
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_analyze_on_cuda_without_a_device_is_one_line_before_any_work(invoke):
    result = invoke("analyze", "nets.py:work", "--data", "digits", "--device", "cuda")
    assert result.exit_code == 2
    assert result.stderr == "error: device='cuda' needs a CUDA device and torch sees none: use device='cpu'\n"


@pytest.mark.skipif(sys.platform == "win32" or os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_must_not_be_written_is_said_before_any_work(invoke, tmp_path):
    (tmp_path / "locked").mkdir(mode=0o500)
    result = invoke("analyze", "nets.py:work", "--data", "digits", "--html", "locked/a.html")
    assert result.exit_code == 2
    assert result.stderr.startswith("error: locked/a.html cannot be written: Permission denied")


def test_a_terminal_without_greek_letters_loses_nothing(invoke, tmp_path):
    command = [sys.executable, "-m", "iternorm", "analyze", "nets.py:mlp", "--data", "digits", "--examples", "100"]
    command += ["--snd", "8", "--json", "a.json", "--html", "a.html"]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    ended = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    output = ended.stdout.decode("ascii")
    # One letter for one letter: the columns stay in line.
    assert "k in  k out  |r| in" in output
    assert "k: condition number" in output
    assert output.endswith("Written: a.json\nWritten: a.html\n")
    assert (tmp_path / "a.json").exists()
    assert "κ" in (tmp_path / "a.html").read_text(encoding="utf-8")


def test_files_are_written_before_anything_is_printed(invoke, tmp_path, monkeypatch):
    monkeypatch.setattr(ModelAnalysis, "table", lambda self: 1 / 0)
    result = invoke("analyze", "nets.py:mlp", "--data", "digits", "--examples", 100, "--snd", "off", "--json", "a.json")
    assert isinstance(result.exception, ZeroDivisionError)
    assert (tmp_path / "a.json").exists()
