"""`python -m evals.labels`: a table of the recorded runs with what probes are trained on.

`table.py` reads results of evals.gsm8k, `inspect_log.py` logs of inspect_ai, `lm_eval.py` samples of lm_eval;
`spans.py` finds the tokens of answers, tool calls and tool results.
"""
