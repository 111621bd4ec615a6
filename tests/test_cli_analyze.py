"""`iternorm analyze`: what it prints, what it writes, and how it fails."""

import json

import pytest
from typer.testing import CliRunner

from iternorm import cli
from page_checks import assert_self_contained

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
"""


@pytest.fixture
def invoke(monkeypatch, tmp_path):
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nets.py").write_text(MODELS)
    return lambda *arguments: CliRunner().invoke(cli.app, [str(argument) for argument in arguments])


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
    ],
)
def test_analyze_says_in_one_line_what_is_wrong(invoke, arguments, text):
    result = invoke("analyze", *arguments)
    assert result.exit_code == 2
    message = " ".join(result.stderr.split())
    assert message.startswith("error: ")
    assert text in message
