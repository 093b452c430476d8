"""The readouts that a run requests, and their values in answers."""

from collections.abc import Iterable, Sequence
from typing import Any

from pydantic import BaseModel

from evals.config import EvalError
from evals.server.server_queries import ask_json, is_closed

RECORDED_FIELDS = ("id", "model", "point", "activation", "labels", "values")  # of a readout, what config.json keeps


class ReadoutValues(BaseModel):
    """The values of a turn's generated tokens.

    Attributes:
        tokens: Their texts; empty if the server sends none.
        values: By readout, a row for each token with a number for each label; None is a number that is not finite.
    """

    tokens: list[str]
    values: dict[str, list[list[float | None]]]


def installed(base_url: str, model: str, names: Sequence[str]) -> dict[str, dict[str, Any]] | None:
    """What the server says of each readout, with its `id`, that is another one for other tensors; None without names.

    Raises:
        EvalError: The server lacks one, or it is of another model, or an autoencoder.
    """
    found = {}
    for name in names:
        described = ask_json(f"{base_url}/readouts/{name}", fails=is_closed)
        if described is None:
            raise EvalError(
                f"--readouts {name}: the server has no readout of this name; GET /v1/readouts lists its readouts",
            )
        if described.get("model") != model:
            raise EvalError(f"--readouts {name}: it is for the model {described.get('model')}, not for {model}")
        if described.get("kind") != "linear":
            raise EvalError(f"--readouts {name}: an autoencoder's features are not scores; name linear readouts")
        found[name] = {key: described.get(key) for key in RECORDED_FIELDS}
    return found or None


def fields(names: Iterable[str]) -> dict[str, Any]:
    """What a chat request has to have for their values, and for the texts of the tokens."""
    asked = [{"name": name, "tokens": "generated"} for name in names]
    return {"readouts": asked, "logprobs": True} if asked else {}


def values_of(choice: dict[str, Any]) -> ReadoutValues | None:
    """What a choice of a chat's answer has of them; None where it has nothing."""
    answered = choice.get("readouts")
    if not answered:
        return None
    entries = (choice.get("logprobs") or {}).get("content") or ()
    # Half an emoji is no text.
    tokens = [str(entry["token"]).encode("utf-8", "replace").decode() for entry in entries]
    values = {name: one.get("generated", {}).get("values", []) for name, one in answered.items()}
    return ReadoutValues(tokens=tokens, values=values)
