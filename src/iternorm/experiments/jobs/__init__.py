"""Jobs: the registry, their results on disk, and the sweep that runs them."""
