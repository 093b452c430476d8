"""Loads a model from the hub or a directory."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from deployments.model.model import Model
from deployments.model.revision import revision_of
from deployments.model.weights import SharedWeights

BFLOAT16 = ("avx512_bf16", "amx_bf16", "arm_bf16")  # torch's names of a processor's instructions for it

logger = logging.getLogger(__name__)


def load(
    name: str,
    *,
    revision: str | None = None,
    dtype: str = "auto",
    device: str | None = None,
    device_map: str | dict[str, Any] | None = None,
    trust_remote_code: bool = False,
    context: int | None = None,
    attention: str = "auto",
    share: bool = False,
    batch_invariant: bool = False,
) -> Model:
    """Load a model from the hub or a directory.

    Args:
        name: A repository id or a directory.
        revision: The repository's branch, tag or commit.
        dtype: `auto` for the checkpoint's own, else `float32`, `bfloat16` or `float16`.
        device: The device; by default a GPU if there is one, else the CPU.
        device_map: Instead of `device`: how to spread the model, as in transformers.
        trust_remote_code: Run the repository's own code.
        context: A context shorter than the model's own, in tokens.
        attention: `eager` or `sdpa`, which is faster; `auto` for transformers' default.
        batch_invariant: Give each sequence the same bits whatever shares its forward passes.
        share: Store the weights in memory that other processes can map: `Model.shared`.

    Raises:
        OSError: The repository or directory does not exist, or there is no memory to share.
        UnsupportedModelError: The model cannot be batched exactly.
    """
    source = str(Path(name).expanduser()) if Path(name).expanduser().is_dir() else name
    where = {"revision": revision, "trust_remote_code": trust_remote_code}
    tokenizer = AutoTokenizer.from_pretrained(source, **where)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device_map is None and device != "cpu":
        device_map = {"": device}  # a GPU gets the weights from the files, not through the host's memory
    hf: Any = AutoModelForCausalLM.from_pretrained(
        source,
        dtype=dtype,
        device_map=device_map,
        attn_implementation=None if attention == "auto" else attention,
        **where,
    )
    has_bfloat16 = any(map(torch.cpu.get_capabilities().get, BFLOAT16))
    if hf.device.type == "cpu" and hf.dtype == torch.bfloat16 and not has_bfloat16:
        logger.warning(
            "this processor has no instructions for bfloat16, the dtype of %s: with dtype=float32 it takes twice the "
            "memory and is several times as fast",
            name,
        )
    shared = None
    if share:  # before the module gets hooks
        shared = SharedWeights.of(hf.eval())
    return Model(hf, tokenizer, name, context, shared, revision_of(source, revision), batch_invariant)
