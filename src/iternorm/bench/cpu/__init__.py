"""The benchmark of layers on a CPU."""
