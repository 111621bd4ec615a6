"""A training run, from its recipe to its rows."""
