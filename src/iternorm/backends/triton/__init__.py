"""The three verbs on a GPU, in Triton: the only place that imports it. `iternorm.whitening.dispatch` loads it."""
