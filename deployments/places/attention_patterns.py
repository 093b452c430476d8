"""Attention patterns of models whose attention is torch's `scaled_dot_product_attention`, which returns none.

transformers looks its attention functions up by name in a registry. The function registered here as `sdpa` calls
transformers' own, and computes patterns from the same queries, keys and mask only for the modules and rows of
`showing`. It keeps the name, because models make masks and choose code by it. It also shows queries and keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, eager_mask
from transformers.modeling_utils import AttentionInterface

CHUNK = 1 << 22  # numbers of a softmax's float32 input: 16 MiB
ROWS = "pattern_rows"  # attribute of an attention module during a forward that shows its patterns
VISITED = "vitrine_visited"  # name of an attention function
VISITS = "head_visits"  # attribute of an attention module whose queries or keys are read or changed
# By side, "q" or "k": gets [batch, tokens, heads, head_dim] and returns a replacement or None.
HeadVisits = dict[str, Callable[[torch.Tensor], torch.Tensor | None]]


def visited(module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and keys [batch, heads, tokens, head_dim] of an attention module, as its visits leave them."""
    visits: HeadVisits | None = module.__dict__.get(VISITS)  # a missing attribute would cost a search in torch
    if not visits:
        return query, key
    given = {"q": query, "k": key}
    for side, visit in visits.items():
        new = visit(given[side].transpose(1, 2))
        given[side] = given[side] if new is None else new.transpose(1, 2)
    return given["q"], given["k"]


def sdpa_with_patterns(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention by transformers' `sdpa`, and patterns [rows, heads, tokens, keys] of the rows that `showing` names.

    Arguments are as for `patterns_of` and transformers; `value` is [batch, key heads, keys, value_dim].
    """
    query, key = visited(module, query, key)
    output, weights = sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    rows = module.__dict__.get(ROWS)  # a missing attribute would cost a search in torch
    if rows is None:
        return output, weights
    causal = options.get("is_causal")
    if causal is None:
        causal = getattr(module, "is_causal", True)
    if attention_mask is None and causal and query.shape[2] > 1:
        attention_mask = query.new_ones(query.shape[2], key.shape[2], dtype=torch.bool).tril()[None, None]
    if len(rows) < len(query):
        query, key = query[rows], key[rows]
        if attention_mask is not None and len(attention_mask) > 1:
            attention_mask = attention_mask[rows]
    return output, patterns_of(query, key, attention_mask, options.get("scaling"))


def _visited_only(
    module: torch.nn.Module, *states: Any, scaling: float | None = None, **_options: Any
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The same without what `sdpa` rejects: of models with eager attention, it shows queries and keys."""
    return sdpa_with_patterns(module, *states, scaling=scaling)


AttentionInterface.register("sdpa", sdpa_with_patterns)
AttentionInterface.register(VISITED, _visited_only)
AttentionMaskInterface.register(VISITED, eager_mask)


@contextmanager
def showing(rows: Mapping[torch.nn.Module, Sequence[int]]) -> Iterator[None]:
    """Make attention modules return the patterns of these rows, ascending, if they can be recomputed."""
    for module, of_module in rows.items():
        setattr(module, ROWS, of_module)
    try:
        yield
    finally:
        for module in rows:
            delattr(module, ROWS)


def configs_of(model: torch.nn.Module) -> list[Any]:
    """The configs, without repetition, that select `sdpa` or `eager` as the attention of a model's modules."""
    configs = {id(config): config for module in model.modules() if (config := getattr(module, "config", None))}
    return [config for config in configs.values() if getattr(config, "_attn_implementation", "") in ("sdpa", "eager")]


@contextmanager
def attending(configs: Sequence[Any], name: str) -> Iterator[None]:
    """Make the modules of these configs, from `configs_of`, use the attention of this name in this context."""
    before = [config._attn_implementation for config in configs]
    try:
        for config in configs:
            config._attn_implementation = name
        yield
    finally:
        for config, own in zip(configs, before, strict=True):
            config._attn_implementation = own


def patterns_of(
    query: torch.Tensor,
    key: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float | None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention patterns, computed as eager attention does, but some queries at a time to bound its copies.

    Args:
        query: [rows, heads, tokens, head_dim].
        key: [rows, key heads, keys, head_dim].
        mask: [rows or 1, heads or 1, tokens, keys], True where a key is read, or what is added to logits.
        scaling: The factor of the products; by default one over the root of head_dim.
        softcap: Limits the products by tanh.
        sinks: [heads] logits that take weight without a value.

    Returns:
        [rows, heads, tokens, keys].
    """
    rows, heads, tokens, size = query.shape
    key_heads, keys = key.shape[1:3]
    scaling = size**-0.5 if scaling is None else scaling
    patterns = query.new_empty(rows, heads, tokens, keys)
    step = max(1, CHUNK // max(1, rows * heads * keys))
    for first in range(0, tokens, step):
        queries = query[:, :, first : first + step]
        count = queries.shape[2]
        by_key_head = queries.reshape(rows, key_heads, heads // key_heads * count, size)
        logits = (by_key_head @ key.transpose(2, 3)).view(rows, heads, count, keys).mul_(scaling)
        if softcap:
            logits = logits.div_(softcap).tanh_().mul_(softcap)
        if mask is not None:
            part = mask[:, :, first : first + step]
            lowest = torch.finfo(logits.dtype).min
            logits = logits.masked_fill_(~part, lowest) if part.dtype == torch.bool else logits.add_(part)
        if sinks is not None:
            logits = torch.cat([logits, sinks.to(logits).view(1, -1, 1, 1).expand(rows, heads, count, 1)], -1)
        patterns[:, :, first : first + step] = logits.softmax(-1, dtype=torch.float32)[..., :keys]
    return patterns
