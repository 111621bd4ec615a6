"""What is no layer: roots of matrices, the moments of a stream."""
