"""LoRA adapters with random weights, as peft saves them."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch


def lora(hf: Any, directory: Path, **settings: Any) -> Any:
    """Save an adapter of a model; returns the model with it, not merged."""
    from peft import LoraConfig, get_peft_model

    own = {"r": 4, "target_modules": "all-linear", "exclude_modules": ["router"], "init_lora_weights": False}
    given = own | settings  # Llama 4's router is linear, but returns a tuple
    with warnings.catch_warnings(action="ignore"), torch.random.fork_rng():
        torch.manual_seed(1)
        adapted = get_peft_model(hf, LoraConfig(**given))
        for weight in adapted.parameters():
            if weight.requires_grad:
                weight.data += 0.1 * torch.randn_like(weight)
        adapted.save_pretrained(directory)
    return adapted.eval()
