"""`python -m evals.report DIR`: one page, report.html, and the parts that other pages share.

Templates are in `pages/`.
"""
