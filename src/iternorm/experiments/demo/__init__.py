"""The demonstration on handwritten digits."""
