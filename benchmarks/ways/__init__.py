"""The implementations that benchmarks compare: this project's engine and its peers.

Each module gives a `Way` to measure.
"""
