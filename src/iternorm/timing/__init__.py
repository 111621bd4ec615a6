"""How layers and networks are timed against each other: turns, threads, clocks, rivals."""
