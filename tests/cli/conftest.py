"""Fixtures of the command line's tests."""

import sys

import pytest
import tiny_experiment
from typer.testing import CliRunner

from iternorm import cli
from iternorm.experiments.jobs import registry
from iternorm.experiments.jobs.registry import Experiment


@pytest.fixture
def invoke(monkeypatch, tmp_path):
    """Runs a command in an empty folder."""
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: CliRunner().invoke(cli.app, [str(argument) for argument in arguments])


@pytest.fixture
def tiny(monkeypatch):
    """The tiny experiment beside the others."""
    monkeypatch.setattr(tiny_experiment, "__doc__", "Tiny: nothing.\n\nCommand: iternorm run tiny\nCost: an hour.")
    monkeypatch.setattr(registry, "EXPERIMENTS", ("fig1", "tiny"))
    monkeypatch.setitem(sys.modules, "iternorm.experiments.paper.tiny", tiny_experiment)
    return Experiment("tiny", tiny_experiment)
