"""Groups above 128 channels, in blocks."""
