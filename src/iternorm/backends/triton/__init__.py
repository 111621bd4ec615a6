"""The three verbs on a GPU, in Triton: the only place that imports it. `iternorm.whitening.ops` imports this when it is used."""
