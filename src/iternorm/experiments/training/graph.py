"""One step of training: forward, backward, scores and the optimizer, eager or replayed from a CUDA graph.

Scores are summed on the device, so that no step makes the host wait.
"""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from iternorm.layers.base import WhiteningNorm
from iternorm.whitening.dispatch import Backend, choose
from iternorm.whitening.groups import effective_size
from iternorm.whitening.settings import Settings

# What is summed over examples: their losses, whether each is wrong, whether its class is not among the five likeliest.
NUM_SCORES = 3
# Steps before a capture, in which cudnn, cublas and Triton choose and compile their kernels.
WARMUP_STEPS = 3


def new_scores(device: torch.device) -> Tensor:
    """Sums that start at zero. They are fp64: an epoch of ImageNet is more examples than fp32 counts exactly."""
    return torch.zeros(NUM_SCORES, dtype=torch.float64, device=device)


def score(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The sum of the losses of a batch, to be differentiated, and its scores ``[NUM_SCORES]``."""
    loss = cross_entropy(logits, labels, reduction="sum")
    with torch.no_grad():
        wrong = (logits.argmax(1) != labels).sum()
        wrong_of_five = torch.zeros_like(wrong)
        if logits.shape[1] > 10:
            wrong_of_five = (logits.topk(5).indices != labels[:, None]).all(1).sum()
        return loss, torch.stack((loss.double(), wrong.double(), wrong_of_five.double()))


class EagerStep:
    """A step of training, launched kernel by kernel.

    Args:
        model: The network as it is called, wrapped for several processes or not.
        optimizer: Of its parameters.
        batch_size: The examples of the global batch divided by the number of processes. Dividing the loss by it makes
            the mean of the gradients over processes the gradient of the mean loss.
        backward: Differentiates a loss; `Accelerator.backward`.
        scores: Each step adds its scores here.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        batch_size: float,
        backward: Callable[[Tensor], Any],
        scores: Tensor,
    ):
        self.model = model
        self.optimizer = optimizer
        self.batch_size = batch_size
        self.backward = backward
        self.scores = scores

    def __call__(self, images: Tensor, labels: Tensor) -> None:
        """Take one step on a batch."""
        self.optimizer.zero_grad(set_to_none=True)
        self._differentiate(images, labels)
        self.optimizer.step()

    def _differentiate(self, images: Tensor, labels: Tensor) -> None:
        loss, scores = score(self.model(images), labels)
        self.backward(loss / self.batch_size)
        self.scores.add_(scores)


class CapturedStep(EagerStep):
    """A step of training whose forward and backward are one CUDA graph, captured at the first call.

    Batches are copied into the graph's own; gradients lie where the capture put them and are overwritten by each
    replay. The optimizer runs after the replay, so that its learning rate may change. Where the capture fails, a
    warning says why and steps are eager from then on.
    """

    _graph: torch.cuda.CUDAGraph | None = None
    _failed = False

    def __call__(self, images: Tensor, labels: Tensor) -> None:
        """Take one step on a batch; all batches have the shape of the first."""
        if self._failed:
            return super().__call__(images, labels)
        if self._graph is None:
            self._images, self._labels = torch.empty_like(images), torch.empty_like(labels)
        self._images.copy_(images)
        self._labels.copy_(labels)
        if self._graph is None:
            try:
                self._graph = self._capture(images.device)
            except Exception as error:
                self._failed = True
                reason = (str(error).strip().splitlines() or [""])[0]
                warnings.warn(
                    f"the step could not be captured in a CUDA graph and is run eagerly: {reason}", stacklevel=2
                )
                return super().__call__(images, labels)
        self._graph.replay()
        self.optimizer.step()
        return None

    def _capture(self, device: torch.device) -> torch.cuda.CUDAGraph:
        """The graph of one step. Running statistics, scores and random state are restored afterwards."""
        kept = [(tensor, tensor.detach().clone()) for tensor in (*self.model.buffers(), self.scores)]
        random_state = torch.cuda.get_rng_state(device)
        graph = torch.cuda.CUDAGraph()
        # Warm-up and capture share a stream, because gradients are accumulated on the stream that first saw them.
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        try:
            with torch.cuda.stream(stream):
                for _ in range(WARMUP_STEPS):
                    self.optimizer.zero_grad(set_to_none=True)
                    self._differentiate(self._images, self._labels)
            torch.cuda.current_stream(device).wait_stream(stream)
            # Without gradients to add to, the backward in the graph writes them.
            self.optimizer.zero_grad(set_to_none=True)
            # Other threads, which load data for one, may use the device meanwhile.
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                self._differentiate(self._images, self._labels)
        finally:
            torch.cuda.synchronize(device)
            with torch.no_grad():
                for tensor, value in kept:
                    tensor.copy_(value)
            torch.cuda.set_rng_state(random_state, device)
        return graph


def is_capturable(model: nn.Module, device: torch.device, num_processes: int) -> bool:
    """Whether a CUDA graph can hold a step: one process on a GPU, and no layer whose solver makes the host wait."""
    layers = (layer for layer in model.modules() if isinstance(layer, WhiteningNorm))
    return device.type == "cuda" and num_processes == 1 and not any(map(_waits, layers))


def _waits(layer: WhiteningNorm) -> bool:
    """Eigendecompositions read their error codes on the host; ZCA in the kernels has none."""
    if layer.solver != "zca":
        return layer.solver == "pca"
    settings = Settings(effective_size(layer.num_features, layer.group_size), "zca", impl=layer.impl)
    return choose(settings, _like(layer)) is not Backend.TRITON


def _like(layer: WhiteningNorm) -> Tensor:
    """An activation of a layer on the GPU."""
    return torch.empty(1, layer.num_features, device="cuda")
