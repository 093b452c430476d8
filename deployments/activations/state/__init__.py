"""What a store keeps besides runs, in one SQLite database: owners, pins, limits, profiles, nodes."""
