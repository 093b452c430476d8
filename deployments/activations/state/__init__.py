"""What a store keeps besides runs, in one SQLite database: owners, pins, limits, profiles, nodes.

Clients' tensor files and readouts are in `uploads/`; lists of runs are in `catalogue/`.
"""
