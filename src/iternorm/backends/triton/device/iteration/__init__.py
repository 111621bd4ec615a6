"""Newton's iteration for groups above 64 channels, in one launch each way."""
