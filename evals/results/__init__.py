"""What an evaluation writes to its results directory.

Files:
    config.json: Everything needed to repeat the evaluation.
    samples/<key>.json: Each sample; `<key>` is `<problem>.<mode>.<variant>`. All other files are made of these.
    trajectories/<key>.jsonl: A line for each message, with tokens, seconds and run ids.
    agent_states/<key>.json: The outcome, tool calls with results, answers and rewards.
    dataset.jsonl: A line for each sample, with `usage`, `run_ids` and `activation_uris` instead of its turns.
    samples.parquet: A row for each sample, with the fields of `dataset.jsonl` as typed columns.
    summary.json: Counts, accuracies and comparisons.
    labels.parquet: Labels of the stored runs, after `python -m evals.labels`.
    report.html: The report.
    activations/<session>/: Copied runs, with `transfer_activations`.

`results.py` writes and reads the directory; `provenance.py` records what repeats the evaluation.
"""
