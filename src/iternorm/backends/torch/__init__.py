"""The verbs in plain torch."""
