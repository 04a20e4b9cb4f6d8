"""Formats in which parameters and gradients travel in low precision, and the bytes that they take."""
