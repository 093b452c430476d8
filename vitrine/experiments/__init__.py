"""Experiments of one call each, as parts of `Server`, and what they return."""
