"""What computes the three verbs: torch, C on a CPU, Triton on a GPU."""
