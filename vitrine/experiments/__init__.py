"""Experiments of one call each, as parts of `Server`, and their results."""
