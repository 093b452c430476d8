"""HTTP parts that all routes share: keys, hosts, limits, parsing, errors, pages and ranges.

Nothing here depends on a model.
"""
