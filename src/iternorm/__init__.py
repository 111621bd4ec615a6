"""Whitening normalization for PyTorch."""

__version__ = "0.1.0"
