"""The inputs of probes: stored runs with their labels, their rows, and features made of them.

Labels of an evaluation's runs are made in `evals.labels`; nothing is fitted here.
"""
