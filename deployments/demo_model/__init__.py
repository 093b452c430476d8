"""The demo model that ships with Vitrine: a small Qwen3 that solves word problems, and its 200 problems."""

from pathlib import Path

WEIGHTS = Path(__file__).parent / "weights"
PROBLEMS = Path(__file__).parent / "demo.jsonl"
