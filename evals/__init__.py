"""Evaluations and analyses over an OpenAI API and stored activations: GSM8K, labels, probes, outliers, reports.

The server is in `serve_app` and `deployments`; `evals` reaches it only over HTTP, and reads its stored files. Only
`lenses` loads a model itself.
"""
