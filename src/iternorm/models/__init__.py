"""For networks that exist: convert, calibrate, fold."""
