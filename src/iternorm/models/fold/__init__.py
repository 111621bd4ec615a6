"""A network without its whitening layers."""
