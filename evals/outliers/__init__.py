"""Outlier features of stored runs: `python -m evals.outliers`."""
