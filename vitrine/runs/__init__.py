"""Stored runs as numpy arrays, fetched from a server or read from files."""
