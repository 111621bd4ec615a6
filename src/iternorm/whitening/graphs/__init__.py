"""For those who look at the operators in a graph: compilers, and counters of FLOPs."""
