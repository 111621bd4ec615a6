"""What a result says of where it came from."""

import getpass
import json
import platform
import re
import shutil
import subprocess
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
import torch

import iternorm
from iternorm.report import provenance as module
from iternorm.report.provenance import provenance


def test_it_names_machine_versions_and_time():
    found = json.loads(json.dumps(provenance()))
    assert found["device"] == "cpu"
    assert found["machine"]["cpu"]
    assert found["machine"]["cores"] >= 1
    assert found["machine"]["threads"] == torch.get_num_threads()
    assert found["machine"]["memory_gib"] is None or found["machine"]["memory_gib"] > 0
    assert found["torch"]["version"] == torch.__version__
    assert found["iternorm"] == iternorm.__version__
    assert found["python"] == platform.python_version()
    time = datetime.fromisoformat(found["time"])
    assert time.utcoffset() == timedelta(0)
    assert abs(datetime.now(timezone.utc) - time) < timedelta(minutes=5)


def test_it_names_no_host_no_user_and_no_path():
    text = json.dumps(provenance())
    words = set(text.replace('"', " ").replace(",", " ").split())
    assert platform.node() not in words
    assert getpass.getuser() not in words
    assert str(Path.home()) + "/" not in text
    assert str(Path(module.__file__).parent) not in text


def test_cpu_model_falls_back_to_the_platform(monkeypatch):
    read = Path.read_text

    def unreadable(self, *args, **kwargs):
        if self == Path("/proc/cpuinfo"):
            raise PermissionError
        return read(self, *args, **kwargs)

    monkeypatch.setattr(Path, "read_text", unreadable)
    assert provenance()["machine"]["cpu"] == (platform.processor() or platform.machine())


def git(folder, *arguments):
    identity = ["-c", "user.name=A", "-c", "user.email=a@example.org"]
    subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True)


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_commit_is_known_in_a_checkout_only_and_marked_when_dirty(tmp_path, monkeypatch):
    copy = tmp_path / "provenance.py"
    shutil.copy(module.__file__, copy)
    monkeypatch.setattr(module, "__file__", str(copy))
    monkeypatch.delenv("ITERNORM_COMMIT", raising=False)
    assert provenance()["commit"] is None
    git(tmp_path, "init")
    # A repository around the package that does not track it is somebody else's.
    assert provenance()["commit"] is None
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "first")
    clean = provenance()["commit"]
    assert re.fullmatch(r"[0-9a-f]{40}", clean)
    (tmp_path / "untracked").touch()
    assert provenance()["commit"] == clean
    copy.write_text("changed")
    assert provenance()["commit"] == clean + "-dirty"
    # A copy of a tree may lie in a checkout of an older commit.
    monkeypatch.setenv("ITERNORM_COMMIT", "abc123")
    assert provenance()["commit"] == "abc123"


def test_commit_is_none_without_git(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert provenance()["commit"] is None
    monkeypatch.setenv("ITERNORM_COMMIT", "abc123")
    assert provenance()["commit"] == "abc123"


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_cuda_without_a_device_is_an_error():
    with pytest.raises(ValueError, match="device='cuda' needs a CUDA device"):
        provenance("cuda")
