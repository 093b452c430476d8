"""Runs in other formats: downloads, exported files, and copies of a session."""
