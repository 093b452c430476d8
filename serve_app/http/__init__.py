"""What every request and answer passes: keys, hosts, limits, parsing, errors, pages and ranges.

Nothing here depends on a model.
"""
