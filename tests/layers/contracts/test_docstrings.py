"""What `help` says of a layer is complete by itself."""

import inspect
import re

import pytest
import torch

import iternorm
from iternorm.layers.docstrings import complete
from iternorm.solvers import most_steps

LAYERS = [getattr(iternorm, f"{kind}{rank}d") for kind in ("IterNorm", "DecorrelatedBatchNorm") for rank in (1, 2, 3)]


PER_SAMPLE = [getattr(iternorm, f"{kind}Whitening{rank}d") for kind in ("Group", "Instance") for rank in (1, 2, 3)]


@pytest.mark.parametrize("layer", [*LAYERS, *PER_SAMPLE, iternorm.SyncIterNorm], ids=lambda layer: layer.__name__)
def test_every_argument_is_explained(layer):
    text = inspect.getdoc(layer) or ""
    assert "In training" in text or layer in PER_SAMPLE
    described = re.findall(r"^    (\w+): \S", text.partition("Args:\n")[2].partition("Example:")[0], re.MULTILINE)
    assert sorted(described) == sorted(inspect.signature(layer).parameters)
    assert "see `WhiteningNorm`" not in text


@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: layer.__name__)
def test_the_first_line_and_the_example_are_the_layers_own(layer):
    text = inspect.getdoc(layer) or ""
    rank = int(layer.__name__[-2])
    assert ("[N, C]", "[N, C, H, W]", "[N, C, D, H, W]")[rank - 1] in text.partition("\n")[0]
    assert f">>> {layer.__name__}(" in text


@pytest.mark.parametrize("layer", [*LAYERS[:3], iternorm.SyncIterNorm], ids=lambda layer: layer.__name__)
def test_what_many_steps_do_is_said(layer):
    text = " ".join(inspect.getdoc(layer).partition("num_iters: ")[2].partition(" running: ")[0].split())
    fp32, fp64 = most_steps(torch.float32), most_steps(torch.float64)
    assert f"tends to ZCA: at most {fp32} steps are taken in fp32, and {fp64} in fp64" in text
    assert "stays finite" in text


def test_a_subclass_of_a_users_own_keeps_its_words():
    class Mine(iternorm.IterNorm2d):
        """My words."""

    assert Mine.__doc__ == "My words."


def test_sections_are_joined_in_order():
    class Base:
        """The base.

        Of all.

        Args:
            a: First.

        Example:
            >>> 1
            1
        """

    class Layer(Base):
        """The layer.

        Args:
            b: Second.

        Example:
            >>> 2
            2
        """

    expected = "The layer.\n\nOf all.\n\nArgs:\n    a: First.\n    b: Second.\n\nExample:\n    >>> 2\n    2"
    assert complete(Layer).__doc__ == expected


def test_without_docstrings_nothing_is_made_up():
    class Layer:
        pass

    assert complete(Layer).__doc__ is None
