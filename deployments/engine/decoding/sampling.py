"""The next token of every row of a batch, each row with its own settings.

The steps and their order are those of transformers' `generate` (its `_get_logits_processor`). It has no presence and
frequency penalties; these follow the repetition penalty, as in vLLM's `apply_penalties` and as OpenAI's API defines
them:

1. `logit_bias` is added (`SequenceBiasLogitsProcessor`; OpenAI).
2. `repetition_penalty` divides a positive logit and multiplies a negative one, of every token of the prompt and
   the answer (Keskar et al. 2019, CTRL; `RepetitionPenaltyLogitsProcessor`).
3. `frequency_penalty` is subtracted for each time a token occurs in the answer, and `presence_penalty` once if it
   occurs (OpenAI).
4. A grammar rules out the tokens that it does not allow (`guided.py`).
5. `min_tokens` rules out end tokens and stop token ids (`MinNewTokensLengthLogitsProcessor`).
6. Temperature 0 takes the likeliest remaining token. Otherwise the logits are divided by `temperature`, `top_k`, then
   `top_p` (Holtzman et al. 2019), then `min_p` (Nguyen et al. 2024) drop unlikely tokens, and one token is drawn from
   the rest.

A threshold keeps every token that is as likely as the last one kept, so the result does not depend on sort order. Rows
do not affect each other. A row without settings costs one maximum.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from deployments.engine.decoding.sampling_state import NEG_INF, SamplingState, TokenValues
from deployments.engine.request import MOST_LOGPROBS, Likeliest, Logprob, Request, Sampling
from deployments.errors import RequestError

NOT_FINITE = "the model computed a value that is not finite for this request"
NO_TOKEN_LEFT = "this request's sampling settings exclude every token that the model could generate here"
TOP_WIDTH = 1024  # the likeliest tokens, among which the limits of top_k and top_p nearly always lie


class ChosenTokens(NamedTuple):
    """The result of choosing a batch's next tokens.

    Attributes:
        tokens: Each row's next token.
        failed: Row -> why it has no token.
        logprobs: Row -> its token's logprob, for rows that request it.
    """

    tokens: list[int]
    failed: dict[int, str]
    logprobs: dict[int, Logprob]


def check_sampling(request: Request, vocabulary: int) -> None:
    """Reject settings that this model, the request's length or its grammar does not support.

    Raises:
        RequestError: An invalid token id, more `min_tokens` than `max_tokens`, too many logprobs, or
            `ignore_eos` with a grammar, which defines where the text ends.
    """
    sampling = request.sampling
    for field, ids in (("logit_bias", sampling.logit_bias), ("stop_token_ids", request.stop_token_ids)):
        if unknown := [id for id in ids if not 0 <= id < vocabulary]:
            raise RequestError(f"{unknown[0]} is not a token id; token ids go from 0 to {vocabulary - 1}", field)
    if sampling.min_tokens > request.max_tokens:
        message = f"min_tokens is {sampling.min_tokens}, more than max_tokens, {request.max_tokens}"
        raise RequestError(message, "min_tokens")
    if request.grammar and request.ignore_eos:
        raise RequestError("ignore_eos cannot be combined with a structured answer: leave it out", "ignore_eos")
    for field, likeliest in (("logprobs", request.logprobs), ("prompt_logprobs", request.prompt_logprobs)):
        if likeliest is not None and not 0 <= likeliest <= MOST_LOGPROBS:
            raise RequestError(f"{field} must be from 0 to {MOST_LOGPROBS}", field)


def choose(logits: torch.Tensor, states: Sequence[SamplingState | None]) -> ChosenTokens:
    """Choose each row's next token.

    Args:
        logits: [rows, vocabulary]; not modified.
        states: One per row; None if the row needs no token.
    """
    top, tokens = logits.max(dim=-1)  # [rows]; NaN wins a maximum
    finite, drawn = top.isfinite(), None
    special = [(i, state) for i, state in enumerate(states) if state and state.special]
    if special:
        rows = [i for i, _ in special]
        best, ids = _by_settings(logits[rows].float(), [state for _, state in special])
        tokens[rows] = ids
        drawn = torch.ones_like(finite)
        drawn[rows] = best.isfinite()
    chosen, sound, *left = torch.stack((tokens, finite) if drawn is None else (tokens, finite, drawn)).tolist()
    failed = {i: NOT_FINITE for i, is_finite in enumerate(sound) if not is_finite}
    if left and not all(left[0]):
        reasons = {i: state.grammar_state.error for i, state in special if state.grammar_state}
        failed = {i: reasons.get(i) or NO_TOKEN_LEFT for i, is_left in enumerate(left[0]) if not is_left} | failed
    logprobs = dict[int, Logprob]()
    asking = {i: most for i, state in enumerate(states) if state and (most := state.logprobs) is not None}
    if asking:
        rows = list(asking)
        logprobs = dict(zip(rows, score(logits[rows], tokens[rows], list(asking.values())), strict=True))
    return ChosenTokens(chosen, failed, logprobs)


def _by_settings(scores: torch.Tensor, states: Sequence[SamplingState]) -> tuple[torch.Tensor, torch.Tensor]:
    """The highest score and the chosen token of each row, [rows] each; overwrites scores [rows, vocabulary]."""
    adjust(scores, states)
    best, tokens = scores.max(dim=-1)
    drawing = [i for i, state in enumerate(states) if state.draws]
    if drawing:
        some = scores if len(drawing) == len(states) else scores[drawing]
        weights = weigh(some, [states[i].sampling for i in drawing])
        tokens[drawing] = draw(weights, [states[i].number() for i in drawing], tokens[drawing])
    return best, tokens


def adjust(scores: torch.Tensor, states: Sequence[SamplingState]) -> None:
    """Add biases, subtract penalties and rule out tokens, in place.

    Args:
        scores: [rows, vocabulary] float32.
        states: One per row.
    """
    if biased := _flat([state.bias for state in states], scores.device):
        rows, ids, bias = biased
        scores[rows, ids] += bias
    if counted := _flat([state.counts for state in states], scores.device):
        rows, ids, counts = counted
        settings = [state.sampling for state in states]
        repetition = _column(scores, (setting.repetition_penalty for setting in settings))[rows, 0]
        frequency = _column(scores, (setting.frequency_penalty for setting in settings))[rows, 0]
        presence = _column(scores, (setting.presence_penalty for setting in settings))[rows, 0]
        value = scores[rows, ids]  # [entries]
        value = torch.where(value < 0, value * repetition, value / repetition)
        scores[rows, ids] = value - frequency * counts - presence * (counts > 0)
    if guided := [(row, state.grammar_state) for row, state in enumerate(states) if state.grammar_state]:
        allowed = torch.stack([grammar_state.allowed() for _, grammar_state in guided])  # [guided, vocabulary]
        at = [row for row, _ in guided]
        scores[at] = scores[at].masked_fill(~allowed.to(scores.device), NEG_INF)
    if barred := _flat([state.barred for state in states], scores.device):
        rows, ids, never = barred
        scores[rows, ids] = never


def _flat(
    entries: Sequence[TokenValues | None], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
    """Entries of several rows as rows, token ids and values, [entries] each; None if no row has any."""
    rows, ids, values = array("q"), array("q"), array("f")
    for row, entry in enumerate(entries):
        if entry:
            rows.extend(array("q", [row]) * len(entry.ids))
            ids.extend(entry.ids)
            values.extend(entry.values)
    if not rows:
        return None
    return (
        torch.frombuffer(rows, dtype=torch.int64).to(device),
        torch.frombuffer(ids, dtype=torch.int64).to(device),
        torch.frombuffer(values, dtype=torch.float32).to(device),
    )


def _column(like: torch.Tensor, values: Iterable[float]) -> torch.Tensor:
    """[rows, 1] float32 on the device of `like`."""
    return torch.tensor(list(values), device=like.device, dtype=torch.float32)[:, None]


def weigh(scores: torch.Tensor, settings: Sequence[Sampling]) -> torch.Tensor:
    """The weight of each token in the draw, relative to the likeliest, whose weight is 1; 0 for never.

    Args:
        scores: [rows, vocabulary] float32, adjusted; overwritten.
        settings: One per row, with a temperature above 0.

    Returns:
        [rows, vocabulary] weights.
    """
    # Relative to the highest, so that a tiny temperature does not overflow.
    scores.sub_(scores.amax(dim=-1, keepdim=True))
    weights = scores.div_(_column(scores, (max(setting.temperature, 1e-5) for setting in settings))).exp_()
    least = _column(scores, (setting.min_p for setting in settings))
    vocabulary = weights.shape[-1]
    cut = [i for i, setting in enumerate(settings) if 0 < setting.top_k < vocabulary or setting.top_p < 1]
    if cut:
        some = weights if len(cut) == len(settings) else weights[cut]
        least[cut] = least[cut].maximum(_cut(some, [settings[i] for i in cut], min(TOP_WIDTH, vocabulary)))
    if cut or any(setting.min_p for setting in settings):
        weights.mul_(weights >= least)
    return weights


def _cut(weights: torch.Tensor, settings: Sequence[Sampling], width: int) -> torch.Tensor:
    """The lowest weight that top_k and top_p keep, [rows, 1].

    Args:
        weights: [rows, vocabulary].
        settings: One per row.
        width: The number of likeliest tokens to search first; rows that need more are sorted in full.
    """
    vocabulary = weights.shape[-1]
    ordered = weights.topk(width, dim=-1).values if width < vocabulary else weights.sort(dim=-1, descending=True).values
    kept = torch.tensor([setting.top_k or vocabulary for setting in settings], device=weights.device)[:, None]
    share = _column(weights, (setting.top_p if setting.top_p < 1 else torch.inf for setting in settings))
    ordered = ordered.masked_fill(torch.arange(width, device=weights.device) >= kept, 0.0)
    whole = torch.where(kept <= width, ordered.sum(dim=-1, keepdim=True), weights.sum(dim=-1, keepdim=True))
    # A token is kept while those before it have not reached top_p of what top_k kept; the first always is.
    passing = (ordered.cumsum(dim=-1) - ordered < share * whole) & (ordered > 0)
    passed = passing.sum(dim=-1, keepdim=True)  # [rows, 1]
    least = ordered.gather(-1, (passed - 1).clamp_min(0))
    if width < vocabulary:
        wider = ((passed == width) & (kept > width)).squeeze(-1).nonzero().squeeze(-1)  # [rows that need more]
        if len(wider):
            least[wider] = _cut(weights[wider], [settings[i] for i in wider.tolist()], vocabulary)
    return least


def draw(weights: torch.Tensor, numbers: Sequence[float], likeliest: torch.Tensor) -> torch.Tensor:
    """Draw one token per row by inverting its cumulative distribution.

    Args:
        weights: [rows, vocabulary], at least one above 0 in each row.
        numbers: One from [0, 1) per row.
        likeliest: [rows] token ids with a weight above 0.

    Returns:
        [rows] token ids with a weight above 0.
    """
    # A GPU adds up a single row in an order that varies from call to call.
    cumulative = weights.expand(max(2, len(weights)), -1).cumsum(dim=-1)[: len(weights)]
    at = torch.searchsorted(cumulative, _column(weights, numbers) * cumulative[:, -1:], right=True)  # [rows, 1]
    at = at.clamp_max_(weights.shape[-1] - 1)
    # Rounding may move a number near 1 past the end or, on a GPU, create a step where the weight is 0.
    return torch.where(weights.gather(-1, at).squeeze(-1) > 0, at.squeeze(-1), likeliest)


def score(logits: torch.Tensor, tokens: torch.Tensor, likeliest: Sequence[int]) -> list[Logprob]:
    """The logprob of each row's token, and the top tokens of the same distribution.

    Args:
        logits: [rows, vocabulary], as the model gave them.
        tokens: [rows] token ids.
        likeliest: The number of top tokens of each row.
    """
    logprobs = logits.float().log_softmax(dim=-1)  # [rows, vocabulary]
    own = logprobs.gather(-1, tokens[:, None]).squeeze(-1).tolist()
    if not any(likeliest):
        return [Logprob(logprob, ()) for logprob in own]
    top = ranked(logprobs, likeliest)
    return [Logprob(logprob, tokens) for logprob, tokens in zip(own, top, strict=True)]


def ranked(logprobs: torch.Tensor, most: Sequence[int]) -> list[Likeliest]:
    """The top tokens of each row; equal ones are ordered by id.

    Args:
        logprobs: [rows, vocabulary].
        most: The number of top tokens of each row.
    """
    # The same number for every row, so that the order of equal tokens does not depend on the neighbours.
    top = logprobs.topk(min(MOST_LOGPROBS, logprobs.shape[-1]), dim=-1)
    ids, order = top.indices.sort(dim=-1)
    values, order = top.values.gather(-1, order).sort(dim=-1, descending=True, stable=True)
    widest = max(most)
    rows = zip(ids.gather(-1, order)[:, :widest].tolist(), values[:, :widest].tolist(), most, strict=True)
    return [tuple(zip(ids[:count], values[:count], strict=True)) for ids, values, count in rows]
