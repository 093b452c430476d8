"""What a store keeps besides runs, in one SQLite database: owners, pins, limits, profiles, nodes.

Lists of runs are in `catalogue/`; tensor files, readouts and profiles of clients are in `deployments.client_data`.
"""
