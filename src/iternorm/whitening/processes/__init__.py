"""A batch that several processes share: what they exchange, and the kernels around it."""
