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

All of it runs on the logits' device, after one upload and until one download, so `launch` does not wait for the device.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from deployments.engine.decoding.logprobs import as_logprobs, score
from deployments.engine.decoding.sampling_state import NEG_INF, SamplingState, TokenValues
from deployments.engine.decoding.transfers import Array, Download, to_device
from deployments.engine.request import MOST_LOGPROBS, Logprob, Request
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


class Choice:
    """The chosen tokens of a batch, which the device computes.

    Attributes:
        tokens: [rows] int64 on the device; a valid id also in a row that needs or has no token.
    """

    def __init__(
        self,
        results: dict[str, torch.Tensor],
        special: Mapping[int, SamplingState],
        asking: Mapping[int, int],
        logits: torch.Tensor,
    ) -> None:
        self.tokens = results["tokens"]
        self._special = special  # row -> state, where settings were applied
        self._asking = asking  # row -> number of top tokens, where logprobs are requested
        self._logits = logits  # of all rows, if any may be chosen again
        self._download = Download(results)

    def read(self) -> ChosenTokens:
        """Wait for the tokens; call it once, after the tokens before these were added and before these are."""
        found = self._download.read()
        chosen = ChosenTokens(found["tokens"].tolist(), {}, {})
        if self._special and not (left := np.isfinite(found["left"])).all():
            for (row, state), any_left in zip(self._special.items(), left, strict=True):
                if not any_left:
                    chosen.failed[row] = (state.grammar_state.error if state.grammar_state else None) or NO_TOKEN_LEFT
        if not (finite := np.isfinite(found["highest"])).all():
            chosen.failed.update(dict.fromkeys(np.flatnonzero(~finite).tolist(), NOT_FINITE))
        if self._asking:
            logprobs = as_logprobs(found, list(self._asking.values()))
            chosen.logprobs.update(zip(self._asking, logprobs, strict=True))
        if "beyond" in found:
            cut = [row for row, state in self._special.items() if state.draws and state.cut]
            if rows := [row for row, beyond in zip(cut, found["beyond"], strict=True) if beyond]:
                self._choose_again(rows, chosen)
        return chosen

    def _choose_again(self, rows: list[int], chosen: ChosenTokens) -> None:
        """Sort rows in full, because their limits lie beyond the likeliest tokens, and wait for their tokens."""
        states = [self._special[row] for row in rows]
        again = launch(self._logits[rows], states, width=self._logits.shape[-1]).read()
        for i, row in enumerate(rows):
            chosen.tokens[row] = again.tokens[i]
            if row in chosen.logprobs:
                chosen.logprobs[row] = again.logprobs[i]


def choose(logits: torch.Tensor, states: Sequence[SamplingState | None]) -> ChosenTokens:
    """Choose each row's next token and wait for it; arguments as in `launch`."""
    return launch(logits, states).read()


def launch(
    logits: torch.Tensor, states: Sequence[SamplingState | None], ahead: int = 0, width: int = TOP_WIDTH
) -> Choice:
    """Choose each row's next token on the device, without waiting for it.

    Args:
        logits: [rows, vocabulary]; not modified.
        states: One per row; None if the row needs no token.
        ahead: 1 for the tokens after the next ones, which are chosen but not added yet; no state then `needs_last`.
        width: The number of likeliest tokens among which to look for the limits of top_k and top_p first. With fewer
            than all, `Choice.tokens` may be wrong where these lie beyond them; `Choice.read` then chooses again.
    """
    top, tokens = _highest(logits)
    results = {"tokens": tokens, "highest": top.float()}
    special = {i: state for i, state in enumerate(states) if state and state.special(ahead)}
    asking = {i: most for i, state in enumerate(states) if state and (most := state.logprobs) is not None}
    if not special and not asking:
        return Choice(results, special, asking, logits)
    arrays, drawing = [_indices(asking)], dict[int, SamplingState]()
    if special:
        assert not (ahead and any(state.needs_last for state in special.values()))
        drawing = {i: state for i, state in enumerate(special.values()) if state.draws}
        arrays += [_indices(special), _indices(drawing), *draw_arrays(list(drawing.values()), ahead)]
        arrays += adjustments(list(special.values()), ahead, logits.shape[-1])
    asked, *uploaded = to_device(arrays, logits.device)
    if special:
        at, drawn, limits, cut, *changes = uploaded
        scores = logits.index_select(0, at).float()
        adjust(scores, changes)
        results["left"], ids = _highest(scores)
        if drawing:
            weights = _rows(scores, drawn)
            masks = len(cut) > 0 or any(state.sampling.min_p for state in drawing.values())
            beyond = weigh(weights, limits, cut, width, masks)
            ids = ids.index_copy(0, drawn, draw(weights, limits[:, 4:], _rows(ids, drawn)))
            if len(cut) and width < logits.shape[-1]:
                results["beyond"] = beyond
        results["tokens"] = tokens.index_copy(0, at, ids)
    if asking:
        logprobs = _rows(logits, asked).float().log_softmax(dim=-1)
        results |= score(logprobs, _rows(results["tokens"], asked), max(asking.values()))
    return Choice(results, special, asking, logits)


def _highest(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The highest number of each row, which is NaN if any is, and its first index."""
    if logits.device.type != "cpu":
        highest, index = logits.max(dim=-1)
        return highest, index
    wide = logits.float()
    return wide.amax(dim=-1), torch.from_numpy(np.from_dlpack(wide).argmax(-1))  # numpy takes a fifth of torch's time


def _indices(rows: Iterable[int]) -> Array:
    return np.array(list(rows), np.int64)


def _rows(values: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Ascending rows of values [all rows, ...]; no copy if they are all."""
    return values if len(rows) == len(values) else values.index_select(0, rows)


def adjustments(states: Sequence[SamplingState], ahead: int, vocabulary: int) -> list[Array]:
    """What `adjust` takes, on the host, from a state for each row."""
    counted, counts = _places([state.counts for state in states], vocabulary)
    settings = [state.sampling for state in states if len(counted)]
    penalties = [(own.repetition_penalty, own.frequency_penalty, own.presence_penalty) for own in settings]
    guided = {row: state.grammar_state for row, state in enumerate(states) if state.grammar_state}
    allowed = [grammar_state.allowed() for grammar_state in guided.values()]
    return [
        *_places([state.bias for state in states], vocabulary),
        counted,
        counts,
        np.array(penalties, np.float32),
        _indices(guided),
        np.stack(allowed) if allowed else np.empty((0, vocabulary), np.bool_),
        _places([state.barred(ahead) for state in states], vocabulary)[0],
    ]


def _places(rows: Sequence[TokenValues | None], vocabulary: int) -> tuple[Array, Array]:
    """The places and the values of all rows' tokens, [entries] each."""
    some = [(row, entry) for row, entry in enumerate(rows) if entry and entry.ids]
    if not some:
        return np.empty(0, np.int64), np.empty(0, np.float32)
    places = [np.frombuffer(entry.ids, np.int64) + row * vocabulary for row, entry in some]
    return np.concatenate(places), np.concatenate([np.frombuffer(entry.values, np.float32) for _, entry in some])


def adjust(scores: torch.Tensor, changes: Sequence[torch.Tensor]) -> None:
    """Change scores [rows, vocabulary] float32 in place by `adjustments`; a place is row * vocabulary + token id.

    `bias` [biased] is added at the places `biased`. `counted` [counted] are the places of tokens that a penalty applies
    to, `counts` how often the answer has each, and `penalties` [rows, 3] repetition, frequency and presence penalty; it
    has no rows if none applies. The rows `guided` keep the tokens that their grammars allow, [guided, vocabulary]. The
    places `barred` are ruled out.
    """
    biased, bias, counted, counts, penalties, guided, allowed, barred = changes
    flat = scores.view(-1)
    if len(biased):
        flat[biased] += bias
    if len(counted):
        rows = counted // scores.shape[-1]
        repetition, frequency, presence = penalties.index_select(0, rows).unbind(-1)  # [counted] each
        value = flat[counted]
        value = torch.where(value < 0, value * repetition, value / repetition)
        flat[counted] = value - frequency * counts - presence * (counts > 0)
    if len(guided):
        scores.index_copy_(0, guided, scores.index_select(0, guided).masked_fill_(~allowed, NEG_INF))
    if len(barred):
        flat.index_fill_(0, barred, NEG_INF)


def draw_arrays(states: Sequence[SamplingState], ahead: int = 0) -> list[Array]:
    """The limits and the cut rows for `weigh`, on the host, from a state for each row."""
    limits = [(*state.limits, state.number(ahead)) for state in states]
    return [np.array(limits, np.float32), _indices(row for row, state in enumerate(states) if state.cut)]


def weigh(
    scores: torch.Tensor, limits: torch.Tensor, cut: torch.Tensor, width: int, masks: bool = True
) -> torch.Tensor:
    """Turn scores into each token's weight in the draw: 1 for the likeliest, 0 for never.

    To sort a row takes about fifteen times as long as to find its likeliest tokens.

    Args:
        scores: [rows, vocabulary] float32, adjusted; overwritten with the weights.
        limits: [rows, 5] float32: those of each state, then a random number.
        cut: [cut rows] the rows with top_k or top_p.
        width: The number of likeliest tokens to search; at least the vocabulary to sort every row.
        masks: Whether any row has top_k, top_p or min_p.

    Returns:
        [cut rows] 1.0 if the limits may lie beyond these tokens, so that the weights are wrong; otherwise 0.0.
    """
    # Relative to the highest, so that a tiny temperature does not overflow.
    scores.sub_(scores.amax(dim=-1, keepdim=True))
    weights, beyond, least = scores.div_(limits[:, :1]).exp_(), limits.new_empty(0), limits[:, 1:2]
    if len(cut):
        lowest, beyond = _lowest(_rows(weights, cut), _rows(limits, cut), min(width, scores.shape[-1]))
        least = least.index_copy(0, cut, lowest)
    if masks:
        weights.mul_(weights >= least)
    return beyond


def _lowest(weights: torch.Tensor, limits: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The lowest weight [rows, 1] that top_k, top_p and min_p keep, and as in `weigh` whether it may be lower [rows].

    Args:
        weights: [rows, vocabulary].
        limits: [rows, 5], as in `weigh`.
        width: The number of likeliest tokens to search; with the whole vocabulary, the weight is never lower.
    """
    vocabulary = weights.shape[-1]
    _, least, kept, share, _ = torch.split(limits, 1, dim=-1)  # [rows, 1] each
    ordered = weights.topk(width, dim=-1).values if width < vocabulary else weights.sort(dim=-1, descending=True).values
    ordered = ordered.masked_fill(torch.arange(width, device=weights.device) >= kept, 0.0)
    whole = torch.where(kept <= width, ordered.sum(dim=-1, keepdim=True), weights.sum(dim=-1, keepdim=True))
    # A token is kept while those before it have not reached top_p of what top_k kept; the first always is.
    passing = (ordered.cumsum(dim=-1) - ordered < share * whole) & (ordered > 0)
    passed = passing.sum(dim=-1, keepdim=True)
    beyond = ((passed == width) & (kept > width)).squeeze(-1).float()
    return least.maximum(ordered.gather(-1, (passed - 1).clamp_min(0))), beyond


def draw(weights: torch.Tensor, numbers: torch.Tensor, likeliest: torch.Tensor) -> torch.Tensor:
    """Draw one token per row by inverting its cumulative distribution.

    Args:
        weights: [rows, vocabulary], at least one above 0 in each row.
        numbers: [rows, 1] float32, from [0, 1].
        likeliest: [rows] token ids with a weight above 0.

    Returns:
        [rows] token ids with a weight above 0.
    """
    # A GPU adds up a single row in an order that varies from call to call.
    cumulative = weights.expand(max(2, len(weights)), -1).cumsum(dim=-1)[: len(weights)]
    at = torch.searchsorted(cumulative, numbers * cumulative[:, -1:], right=True)  # [rows, 1]
    at = at.clamp_max_(weights.shape[-1] - 1)
    # Rounding may move a number near 1 past the end or, on a GPU, create a step where the weight is 0.
    return torch.where(weights.gather(-1, at).squeeze(-1) > 0, at.squeeze(-1), likeliest)
