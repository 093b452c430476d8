"""The demo model that ships with Vitrine: a small Qwen3 that solves word problems, and its 200 problems.

The server loads it like any other model; `evals.gsm8k` evaluates it.
"""

from pathlib import Path

WEIGHTS = Path(__file__).parent / "weights"
PROBLEMS = Path(__file__).parent / "demo.jsonl"
INSTRUCTION = "\n\nSolve it step by step. End with #### and the answer."
"""What the evaluator appends to every question, as half of the training questions had it."""
