"""The examples run, in small sizes, as a user would run them."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

from checks import ended_well

import iternorm

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(*command, folder):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(iternorm.__file__).parents[1])}
    process = subprocess.Popen(
        [sys.executable, *map(str, command)],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=200)
    except subprocess.TimeoutExpired:
        # torchrun's own children too.
        os.killpg(process.pid, signal.SIGKILL)
        output, errors = process.communicate()
        raise AssertionError(f"{command} did not end:\n{output}\n{errors}") from None
    assert ended_well(process.returncode, errors), errors
    return output


def test_finetune_resnet(tmp_path):
    output = run(EXAMPLES / "finetune_resnet.py", "--steps", 3, folder=tmp_path)
    before, after = re.search(r"BatchNorm, 3 steps: test accuracy (\S+)\n.*test accuracy (\S+)\n", output).groups()
    # The swapped model is the trained one until it is trained further.
    assert before == after
    assert "fine-tuned 3 steps: loss" in output
    assert "statistics of the whole training set" in output


def test_train_distributed(tmp_path):
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2)
    output = run(*launcher, EXAMPLES / "train_distributed.py", "--steps", 3, "--batch", 31, folder=tmp_path)
    assert "2 processes, 3 steps: loss" in output
    assert "running statistics alike on all processes: True" in output


def test_fold_and_export(tmp_path):
    output = run(EXAMPLES / "fold_and_export.py", "--steps", 10, folder=tmp_path)
    assert re.search(r"1 +previous +0\n4 +previous +3\n8 +next +9\n", output)
    assert float(re.search(r"in torch: (\S+)", output).group(1)) < 1e-4
    assert [path.name for path in tmp_path.iterdir()] == ["digits.onnx"]


def test_study(tmp_path):
    study = EXAMPLES / "study.py"
    output = run("-m", "iternorm", "run", study, "--smoke", "--seeds", 1, folder=tmp_path)
    assert "4 jobs: 4 ran" in output
    assert "4 finished before" in run("-m", "iternorm", "run", study, "--smoke", "--seeds", 1, folder=tmp_path)
    output = run("-m", "iternorm", "report", study, "--out", ".", folder=tmp_path)
    assert "study.html" in output


def test_train_wmse(tmp_path):
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2)
    words = ("--steps", 4, "--batch", 160, "--generated")
    output = run(*launcher, EXAMPLES / "train_wmse.py", *words, folder=tmp_path)
    assert "2 processes, generated images, 4 steps" in output
    smallest, largest = re.search(r"along their axes: (\S+) to (\S+)", output).groups()
    # Whitened over both processes, so white over both.
    assert abs(float(smallest) - 1) < 1e-2
    assert abs(float(largest) - 1) < 1e-2
