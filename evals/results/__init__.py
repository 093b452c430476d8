"""What an evaluation writes to its results directory: config.json, samples, counts, activations.

`results.py` writes and reads the directory; `provenance.py` records what repeats the evaluation.
"""
