"""A ReLU, or an addition and a ReLU, behind a whitening layer become part of the layer."""
