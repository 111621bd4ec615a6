"""The launches of a plan, by what they do; the moments are in `plan`."""
