"""One small file a figure or table of the paper."""
