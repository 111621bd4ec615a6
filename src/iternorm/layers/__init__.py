"""The layers: modules with BatchNorm's contract."""
