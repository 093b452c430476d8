"""Continuous batching over a Hugging Face language model, with every activation open. No Ray in it.

from deployments.engine.engine import Engine
from deployments.model.load import load
from deployments.engine.request import Request

engine = Engine(load("Qwen/Qwen3-0.6B"))
done = engine.generate([Request("a", prompt_ids, max_tokens=64)])
"""
