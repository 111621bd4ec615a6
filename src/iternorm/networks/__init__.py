"""The networks that experiments train and benchmarks time, and the normalizations in them."""
