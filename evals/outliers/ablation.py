"""What zeroing features costs in perplexity, beside as many random ones: asked of a server by its interventions."""

import asyncio
import math
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from evals.config import EvalError
from evals.outliers.texts import Prompt
from evals.server.answers import RequestFailed
from evals.server.client import ChatClient
from evals.server.server_queries import ask_json
from evals.task.problems import json_lines

Record = dict[str, Any]
MOST_OPERATIONS = 256  # of a request
LEAST_TEXTS = 20  # that an interval is made of
RESAMPLES = 2000
PARALLEL = 8  # requests in flight


def ablate(
    base_url: str,
    model: str,
    prompts: Sequence[Prompt],
    points: Sequence[str],
    features: Sequence[int],
    width: int,
    *,
    seeds: int = 5,
) -> Record:
    """Score texts as they are, with the features set to zero, and with random other features set to zero.

    Args:
        base_url: The server's, ends in `/v1`.
        model: Its id there.
        prompts: Texts, or token ids.
        points: Where features are set to zero: all of these, for all tokens.
        features: Which, at least one.
        width: How many features there are.
        seeds: How many draws of random features.

    Returns:
        Perplexities over all tokens but each text's first, and how much more nats a token takes; `random` has the
        means over draws, `spread` the standard deviation between them. Intervals are of 95%, from a bootstrap over
        texts, of conditions over the same texts; the draws are fixed in it.

    Raises:
        EvalError: Too few other features, or no token to score.
        RequestFailed: The server refused, or did not answer.
    """
    others = np.setdiff1d(np.arange(width), features)
    if len(others) < len(features):
        raise EvalError(
            f"--ablate: {len(features)} of {width} features are outliers, so there are too few "
            "other features to compare with",
        )
    draws = [np.random.default_rng(seed).choice(others, len(features), replace=False) for seed in range(seeds)]
    drawn = [sorted(draw.tolist()) for draw in draws]
    nats, tokens = asyncio.run(_score(base_url, model, prompts, points, [[], list(features), *drawn]))
    if not tokens.sum():
        raise EvalError("--ablate: every text has one token only, and the first token of a text has no probability")
    return {
        "model": model,
        "points": list(points),
        "features": list(features),
        "texts": len(tokens),
        "tokens": int(tokens.sum()),
        **_compared(nats, tokens),
        "drawn": drawn,
    }


def check_points(base_url: str, model: str, points: Sequence[str], width: int) -> None:
    """Return if the model's points have as many features as were recorded: else a feature's number is another's there.

    Raises:
        EvalError: They have others, as of a session that recorded some features alone; or a request has no room for
            so many points.
        RequestFailed: There is no server.
    """
    if len(points) > MOST_OPERATIONS:
        raise EvalError(
            f"--ablate: {len(points)} points, and a request has {MOST_OPERATIONS} operations: choose fewer --points"
        )
    structure = ask_json(f"{base_url}/model/structure", {"model": model}) or {}
    for point in structure.get("points", ()):
        if point["name"] in points and (features := math.prod(point["shape"])) != width:
            raise EvalError(
                f"--ablate: {width} features of {point['name']} were recorded, and the model has {features}: their "
                "numbers are not the model's; record the points whole"
            )


def read_prompts(file: Path, most: int) -> list[Prompt]:
    """The first texts of a file of JSON lines, each with `text` or `prompt`.

    Raises:
        EvalError: A line is none, by its number; or there is none at all.
    """
    found = list[Prompt]()
    try:
        for place, row in islice(json_lines(file), most):
            if not isinstance(text := row.get("text") or row.get("prompt"), str):
                raise EvalError(f"--texts {file}, {place}: an object with text or prompt is needed")
            found.append(text)
    except ValueError as error:
        raise EvalError(f"--texts {file}, {error}") from error
    if not found:
        raise EvalError(f"--texts {file}: the file has no text")
    return found


async def _score(
    base_url: str, model: str, prompts: Sequence[Prompt], points: Sequence[str], zeroed: Sequence[Sequence[int]]
) -> tuple[np.ndarray, np.ndarray]:
    """Nats of each text where some features are zero, float64 `[conditions, texts]`, and its tokens `[texts]`."""
    client = ChatClient(base_url, timeout=300.0, retries=8, parallel=PARALLEL, max_outage=60.0)
    free = asyncio.Semaphore(PARALLEL)

    async def one(prompt: Prompt, features: Sequence[int]) -> tuple[float, int]:
        body: Record = {"model": model, "prompt": prompt, "max_tokens": 0, "echo": True, "logprobs": 0}
        body["preset"] = "none"
        if features:
            part = {"index": list(features)}
            body["interventions"] = [{"op": "zero", "point": point, "features": part} for point in points]
        async with free:
            return _nats(await client.complete(body))

    tasks = [asyncio.ensure_future(one(prompt, features)) for features in zeroed for prompt in prompts]
    try:
        scored = np.array(await asyncio.gather(*tasks)).reshape(len(zeroed), len(prompts), 2)
    finally:
        for task in tasks:
            task.cancel()
        await client.close()
    return scored[:, :, 0], scored[0, :, 1]


def _nats(answer: Record) -> tuple[float, int]:
    """Of a scored prompt: minus its logprobs together, and how many there are."""
    try:
        logprobs = [float(each) for each in answer["choices"][0]["logprobs"]["token_logprobs"] if each is not None]
    except (LookupError, TypeError, ValueError) as error:
        raise RequestFailed("the server does not score prompts: its answer to echo has no logprobs") from error
    return -sum(logprobs), len(logprobs)


def _compared(nats: np.ndarray, tokens: np.ndarray) -> Record:
    """Figures of the conditions: none zeroed, the outliers, and draws of others.

    Args:
        nats: Of each text, `[conditions, texts]`.
        tokens: That were scored of each text, `[texts]`.
    """
    texts = len(tokens)
    weights = np.random.default_rng(0).multinomial(texts, np.full(texts, 1 / texts), RESAMPLES)
    weights = weights[weights @ tokens > 0]
    is_enough = texts >= LEAST_TEXTS

    def figures(name: str, values: np.ndarray) -> Record:
        low, high = np.quantile(values[1:], [0.025, 0.975]).tolist() if is_enough else (None, None)
        return {name: float(values[0]), f"{name}_low": low, f"{name}_high": high}

    # The first row is of the texts as they are, the others of resamples: [1 + resamples, conditions].
    every = np.vstack([np.ones(texts), weights])
    per_token = every @ nats.T / (every @ tokens)[:, None]
    base, outliers, random = per_token[:, 0], per_token[:, 1], per_token[:, 2:]
    mean = random.mean(axis=1)
    said: Record = {
        "base": figures("perplexity", np.exp(base)),
        "outliers": figures("perplexity", np.exp(outliers)) | figures("more_nats", outliers - base),
        "random": figures("perplexity", np.exp(random).mean(axis=1)) | figures("more_nats", mean - base),
        "difference": figures("more_nats", outliers - mean),
    }
    said["random"] |= {"each": np.exp(random[0]).tolist(), "spread": float(np.exp(random[0]).std(ddof=1))}
    said["no_interval"] = None if is_enough else f"{texts} texts, and an interval is made of {LEAST_TEXTS} or more"
    return said
