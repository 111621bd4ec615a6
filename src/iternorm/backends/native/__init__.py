"""The verbs `moments` and `apply` for the CPU in C, compiled on the machine that runs them when they are first used."""
