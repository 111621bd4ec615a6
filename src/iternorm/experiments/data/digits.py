"""Scikit-learn's handwritten digits, which need no download."""

from typing import NamedTuple

import torch
from torch import Tensor


class Digits(NamedTuple):
    """The digits, pixels in [0, 1]; the split is the same for every seed."""

    train_images: Tensor
    test_images: Tensor
    train_labels: Tensor
    test_labels: Tensor


def load_digits() -> Digits:
    """Scikit-learn's digits: 1347 to train on and 450 to test on, the classes alike in both."""
    from sklearn import datasets
    from sklearn.model_selection import train_test_split

    images, labels = datasets.load_digits(return_X_y=True)
    train_images, test_images, train_labels, test_labels = map(
        torch.as_tensor, train_test_split(images, labels, test_size=450, random_state=0, stratify=labels)
    )
    return Digits(train_images.float() / 16, test_images.float() / 16, train_labels.long(), test_labels.long())
