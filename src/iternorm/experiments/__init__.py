"""The paper's experiments, and the networks and data they need."""
