"""The SQLite database that lists sessions, runs and segments. It is rebuilt from the segments at any time."""
