"""The SQLite database that lists sessions, runs and segments. It can be rebuilt from the segments at any time.

Facts that segments do not contain, such as owners and pins, are in `state/`.
"""
