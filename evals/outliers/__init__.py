"""Outlier features and massive activations of stored runs: `python -m evals.outliers`.

Other statistics of activations are in `evals.results`; the page templates are in `evals.report`.
"""
