"""Continuous batching over a Hugging Face language model, with access to every activation. It does not use Ray.

from deployments.engine.engine import Engine
from deployments.model.load import load
from deployments.engine.request import Request

engine = Engine(load("Qwen/Qwen3-0.6B"))
done = engine.generate([Request("a", prompt_ids, max_tokens=64)])
"""
