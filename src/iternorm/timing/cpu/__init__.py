"""Layers timed against each other on a CPU."""
