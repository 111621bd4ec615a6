"""The one operation behind every layer: moments, inverse_sqrt, apply, with their gradients."""
