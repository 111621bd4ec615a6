"""How layers and networks are timed: candidates and baselines, their order, threads and clocks."""
