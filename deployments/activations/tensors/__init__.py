"""Tensor files that clients upload."""
