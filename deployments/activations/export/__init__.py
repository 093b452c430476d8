"""Runs in other formats: downloads, exported files, and copies of a session.

Reading the stored rows is in `reader/`; the HTTP routes are in `serve_app`.
"""
