"""How layers and networks are timed against each other: their order, threads, clocks and baselines (rivals)."""
