"""What an evaluation writes to its results directory: config.json, samples, counts, statistics, activations.

`results.py` writes and reads the directory; `provenance.py` compares two configurations.
"""
