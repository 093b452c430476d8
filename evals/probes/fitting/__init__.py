"""Probes and their controls: folds, solvers, cross-validation, the headline, and baselines of the text alone.

Choosing stored runs and their labels is in `inputs/`; files are written in `outputs/`.
"""
