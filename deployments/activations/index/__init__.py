"""The index of a store: which sessions, runs and files it has, in an SQLite database that is made from the files."""
