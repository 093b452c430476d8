"""Probes and their controls: folds, solvers, cross-validation, the headline, and baselines of the text alone."""
