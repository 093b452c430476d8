"""HTTP parts shared by all routes: keys, hosts, limits, bodies, errors, pages and ranges.

Nothing here depends on a model.
"""
