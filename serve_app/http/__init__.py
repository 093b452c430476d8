"""HTTP parts shared by all routes: keys, hosts, limits, parsing, errors, pages and ranges.

Nothing here depends on a model.
"""
