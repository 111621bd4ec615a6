"""Fixtures of the tests of the Triton backend."""

import pytest


@pytest.fixture
def launched(monkeypatch):
    """As on a GPU, but that nothing runs: the launches on a stream, each with what its kernel takes and was given."""
    from iternorm.backends.triton import items, plan, runtime
    from iternorm.whitening.processes import collective

    found = []

    def prepared(self):
        names = self.kernel.arg_names[: -len(self.integers) - len(self.constants) - 1]
        return lambda *args: found.append((self.kernel.__name__, names, args)), self.grid, (), ()

    monkeypatch.setattr(runtime.Launch, "prepared", property(prepared), raising=False)
    monkeypatch.setattr(runtime, "stream_of", lambda device: 7)
    for module in (items, plan):
        monkeypatch.setattr(module, "_plans", {})
    # No kernel has written counts that could be looked at.
    monkeypatch.setattr(collective, "_check_counts", lambda gathered, group: None)
    return found
