"""Fit a whitening to data and apply it: the estimator `iternorm.Whitener`."""
