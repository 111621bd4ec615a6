"""Launches for what is no layer: roots of matrices, and the moments of one batch after another."""
