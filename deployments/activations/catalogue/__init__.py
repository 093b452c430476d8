"""The SQLite database that lists sessions, runs and segments. It can be rebuilt from the segments at any time."""
