"""The networks of the experiments and the normalizations in them."""
