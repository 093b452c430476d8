"""`python -m evals.compare A B [C ...]`: results directories side by side.

Paired where they share problems.
"""
