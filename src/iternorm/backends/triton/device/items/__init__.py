"""Items of a batch that are whitened each by itself."""
