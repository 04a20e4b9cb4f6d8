"""Predict the memory of a step from its traces."""
