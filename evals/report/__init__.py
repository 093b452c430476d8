"""`python -m evals.report DIR [DIR ...]`: the page and the text of an evaluation, beside others where they are named.

Templates, also those of other pages, are in `pages/`.
"""
