"""Claims: one holder at a time, and none that is dead."""

import os
import signal
import subprocess
import sys
import threading

import pytest

from iternorm.experiments.jobs import locks

HOLD = """
import sys, time
from pathlib import Path
from iternorm.experiments.jobs import locks
held = locks.claim(Path(sys.argv[1]))
print(held is not None, flush=True)
time.sleep(60)
"""


def test_a_claim_is_held_until_it_is_released(tmp_path):
    path = tmp_path / "a" / "job.lock"
    assert not locks.is_held(path)
    with locks.claim(path):
        assert locks.is_held(path)
        assert locks.claim(path) is None
    assert not locks.is_held(path)
    assert not path.exists()
    again = locks.claim(path)
    again.release()
    again.release()
    assert not locks.is_held(path)


def test_looking_does_not_take(tmp_path):
    path = tmp_path / "job.lock"
    path.touch()
    looking, stop = threading.Event(), threading.Event()

    def look():
        while not stop.is_set():
            locks.is_held(path)
            looking.set()

    watcher = threading.Thread(target=look)
    watcher.start()
    looking.wait()
    try:
        for _ in range(200):
            held = locks.claim(path)
            assert held is not None
            held.release()
            path.touch()
    finally:
        stop.set()
        watcher.join()


def test_threads_take_turns(tmp_path):
    path = tmp_path / "job.lock"
    holders, most, guard = 0, 0, threading.Lock()
    taken = []

    def work():
        nonlocal holders, most
        while len(taken) < 60:
            held = locks.claim(path)
            if held is None:
                continue
            with guard:
                holders += 1
                most = max(most, holders)
            taken.append(1)
            with guard:
                holders -= 1
            held.release()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1


def test_a_dead_process_keeps_nothing(tmp_path):
    path = tmp_path / "job.lock"
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(path)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "True\n"
        assert locks.is_held(path)
        assert locks.claim(path) is None
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        # The file it left is no claim.
        assert path.exists()
        assert not locks.is_held(path)
        locks.claim(path).release()
    finally:
        holder.kill()
        holder.stdout.close()


# In a process of its own: forking one with threads, as pytest's may be, is deprecated.
FORK = """
import os, signal, sys
from pathlib import Path
from iternorm.experiments.jobs import locks
path = Path(sys.argv[1])
held = locks.claim(path)
read, write = os.pipe()
child = os.fork()
if child == 0:
    held.release()
    os.write(write, b"x")
    signal.pause()
os.read(read, 1)
print(locks.is_held(path))
held.release()
print(locks.is_held(path))
os.kill(child, signal.SIGKILL)
os.waitpid(child, 0)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_forked_child_neither_keeps_nor_releases(tmp_path):
    command = [sys.executable, "-W", "ignore", "-c", FORK, str(tmp_path / "job.lock")]
    result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert result.stdout.split() == ["True", "False"]


def test_a_file_system_without_locks_is_named(tmp_path, monkeypatch):
    import fcntl

    def refuse(descriptor, operation):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(OSError, match=r"job.lock cannot be locked .*use a results folder on"):
        locks.claim(tmp_path / "job.lock")


def test_a_file_that_was_just_removed_is_no_claim(tmp_path, monkeypatch):
    import fcntl

    path = tmp_path / "job.lock"
    holder = locks.claim(path)
    real = fcntl.flock

    def released_meanwhile(descriptor, operation):
        holder.release()
        real(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", released_meanwhile)
    second = locks.claim(path)
    assert locks.is_held(path)
    assert locks.claim(path) is None
    second.release()
