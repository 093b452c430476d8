"""What every way of generating generates from."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import GenerationConfig


@dataclass(frozen=True)
class Work:
    """What every way generates from.

    Attributes:
        prompts: Token ids of each request.
        new_tokens: How many tokens each generates, greedily and without end tokens.
        device: Where the model is.
    """

    prompts: list[list[int]]
    new_tokens: int
    device: str = "cpu"

    def settings(self) -> GenerationConfig:
        """The same as transformers' generation config."""
        return GenerationConfig(  # type: ignore[no-untyped-call]
            do_sample=False, max_new_tokens=self.new_tokens, pad_token_id=0, eos_token_id=None
        )

    def padded(self) -> tuple[torch.Tensor, torch.Tensor]:
        """[requests, longest] prompts padded on the left, and the mask that says so."""
        longest = max(map(len, self.prompts))
        ids = [[0] * (longest - len(prompt)) + prompt for prompt in self.prompts]
        mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in self.prompts]
        return torch.tensor(ids, device=self.device), torch.tensor(mask, device=self.device)
