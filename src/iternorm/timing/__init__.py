"""How times are taken: turns, threads, a GPU's clock."""
