"""`python -m evals.labels RESULTS`: a table of the recorded runs with what probes are trained on.

`spans.py` finds the tokens of answers, tool calls and tool results.
"""
