"""Continuous batching over a Hugging Face language model, with access to every activation. It does not use Ray."""
