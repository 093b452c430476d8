"""Readouts that clients install."""
