"""What is kept besides runs, in one SQLite database: owners, pins, limits, profiles, nodes."""
