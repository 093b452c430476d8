"""The chat request of one turn: its body, and the seed of its sampling."""

import hashlib
from typing import Any

from deployments.demo_model.calculator import TOOL
from deployments.points.token_choices import as_json
from evals.config import Config, Mode
from evals.server.readout_client import fields
from evals.task.text_tools import END, as_text


def request_body(messages: list[dict[str, Any]], mode: Mode, capture: dict[str, Any], config: Config) -> dict[str, Any]:
    """The chat request of one turn, with the capture fields where activations are collected.

    Args:
        messages: all so far.
        mode: whether the calculator is offered.
        capture: what the run is to be found by.
        config: the run's options.
    """
    body: dict[str, Any] = {
        "model": config.model,
        "messages": messages,
        "max_tokens": config.max_tokens,
        "temperature": config.temperature or 0.0,
    }
    if mode == "with-tools" and config.tools == "text":
        body |= {"messages": as_text(messages), "stop": [END]}
    elif mode == "with-tools":
        body["tools"] = [TOOL]
    further = {"top_p": config.top_p, "top_k": config.top_k, "chat_template_kwargs": config.chat_template_kwargs}
    body |= {name: value for name, value in further.items() if value not in (None, {})}
    body |= fields(config.readouts)
    if config.collect_activations:
        where = {"points": config.points, "layers": config.layers, "sites": config.sites}
        body["session_id"] = config.session_id
        body["store_activations"] = True
        body["capture"] = {name: value for name, value in where.items() if value} | capture | {"store_text": True}
        if config.tokens != "all":
            body["capture"]["tokens"] = as_json(config.tokens)
    return body


def request_seed(config: Config, key: str, turn: int) -> dict[str, int]:
    """What a turn's sampling hangs on: the run's seed, the sample and the turn, so that a run repeats.

    Greedy answers need none.
    """
    if not config.temperature:
        return {}
    seed = config.seed if config.sampling_seed is None else config.sampling_seed
    return {"seed": int.from_bytes(hashlib.sha256(f"{seed}:{key}:{turn}".encode()).digest()[:4], "big") >> 1}
