"""Outlier features and massive activations of stored runs: `python -m evals.outliers`.

The page templates are in `evals.report`.
"""
