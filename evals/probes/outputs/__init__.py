"""The files of a sweep: probes.json, its tables, the probe, and the page.

The numbers in them are computed in `fitting/`.
"""
