"""How layers are timed against each other on a GPU."""
