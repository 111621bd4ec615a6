"""A step's parts that need no device: what a CUDA graph can hold, and what is scored."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from iternorm.experiments.training import graph
from iternorm.experiments.training.graph import is_capturable, new_scores, score
from iternorm.networks.models import build
from iternorm.whitening.dispatch import Backend


def test_what_can_be_captured(monkeypatch):
    gpu = torch.device("cuda")
    # Without triton or with large groups ZCA is an eigendecomposition, which makes the host wait.
    kernels = {True: Backend.TRITON, False: Backend.VERBS}
    monkeypatch.setattr(graph, "choose", lambda settings, x: kernels[settings.group_size <= 64])
    monkeypatch.setattr(graph, "_like", lambda layer: None)
    captured = {"plain": True, "BN": True, "IterNorm T=5": True, "DBN-16": True, "DBN": False, "DBN-16 pca": False}
    for norm, expected in captured.items():
        model = build("mlp", norm, 10, (1, 4, 4))
        assert is_capturable(model, gpu, 1) is expected
        assert not is_capturable(model, gpu, 2)
        assert not is_capturable(model, torch.device("cpu"), 1)


def test_scores_are_sums():
    logits = torch.tensor([[5.0, 1, 2, 0, 3, 4, *[-1.0] * 6]] * 2)
    labels = torch.tensor([0, 3])
    loss, scores = score(logits, labels)
    assert loss == pytest.approx(cross_entropy(logits, labels).item() * 2)
    assert scores.tolist() == pytest.approx([loss.item(), 1, 1])
    assert score(logits[:, :10], labels)[1][2] == 0
    assert new_scores(torch.device("cpu")).dtype == torch.float64
