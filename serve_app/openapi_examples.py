"""Examples of requests and answers in `/openapi.json`."""

from __future__ import annotations

import json
from typing import Any

from serve_app.http.errors import ApiError
from serve_app.openapi import Responses, errors, failure


def answers(example: Any, streamed: list[dict[str, Any]] | None = None) -> Responses:
    """A successful answer with an example; if the route streams, also an example of its events."""
    content: dict[str, Any] = {"application/json": {"schema": {"type": "object"}, "example": example}}
    if streamed is not None:
        events = [json.dumps(event) for event in streamed] + ["[DONE]"]
        text = "".join(f"data: {event}\n\n" for event in events)
        content["text/event-stream"] = {"example": text}
    return {200: {"description": "With `stream`, as events." if streamed else "Done.", "content": content}}


def _head(kind: str) -> dict[str, Any]:
    name = "cmpl" if kind == "text_completion" else "chatcmpl"
    return {"id": f"{name}-5f2b", "object": kind, "created": 1763700000, "model": "vitrine-demo"}


USAGE = {"prompt_tokens": 21, "completion_tokens": 2, "total_tokens": 23}
END: dict[str, Any] = {"index": 0, "finish_reason": "stop", "logprobs": None}
PIECE = END | {"finish_reason": None}

CHAT = answers(
    _head("chat.completion")
    | {"choices": [END | {"message": {"role": "assistant", "content": "36", "refusal": None}}], "usage": USAGE},
    [
        _head("chat.completion.chunk") | {"choices": [PIECE | {"delta": {"role": "assistant", "content": ""}}]},
        _head("chat.completion.chunk") | {"choices": [PIECE | {"delta": {"content": "36"}}]},
        _head("chat.completion.chunk") | {"choices": [END | {"delta": {}}]},
    ],
)
COMPLETION = answers(
    _head("text_completion") | {"choices": [END | {"text": " 36"}], "usage": USAGE},
    [_head("text_completion") | {"choices": [PIECE | {"text": " 36"}]}],
)

_CHAT = {"messages": [{"role": "user", "content": "Ann has 3 boxes of 12 pens. How many pens is that?"}]}
CHAT_EXAMPLES: dict[str, Any] = {
    "plain": {"value": {"model": "vitrine-demo", **_CHAT, "temperature": 0, "max_tokens": 64}},
    "streamed": {"value": {"model": "vitrine-demo", **_CHAT, "stream": True, "max_tokens": 64}},
    "activations": {
        "summary": "records two layers' outputs for every token",
        "value": {
            "model": "vitrine-demo",
            **_CHAT,
            "max_tokens": 64,
            "capture": {"points": ["layers.1.output", "layers.3.output"]},
            "session_id": "first-steps",
        },
    },
    "logit lens": {
        "summary": "two layers' top tokens at the position that predicts each token",
        "value": {
            "model": "vitrine-demo",
            **_CHAT,
            "max_tokens": 16,
            "logit_lens": {"layers": [1, -1], "top_k": 3},
        },
    },
}
COMPLETION_EXAMPLES: dict[str, Any] = {
    "text": {"value": {"model": "vitrine-demo", "prompt": "Ann has 3 boxes.", "max_tokens": 16}},
    "texts": {"value": {"model": "vitrine-demo", "prompt": ["Ann has", "Tom has"], "n": 2, "max_tokens": 4}},
}

_MODEL: dict[str, Any] = {"id": "vitrine-demo", "object": "model", "owned_by": "vitrine", "created": 1763700000}
_MODEL |= {"max_model_len": 4096, "tokens_depend_on_batch": False, "savepoints": [], "generation_config": {}}
_MODEL |= {"device_name": None}
_MODEL |= {"revision": "1ce1f1b1bc4fcb7a4a8c9e3dd4f3f9b1c7a2a5d0"}
_MODEL |= {"options": {"dtype": "float32", "max_running": 64}, "versions": {"vitrine": "0.1.0", "torch": "2.13.0"}}
_MODEL |= {"source": "/home/you/vitrine/deployments/demo_model/weights"}
MODEL = answers(_MODEL)
MODELS = answers({"object": "list", "data": [_MODEL]})

TOKENS = answers({"count": 3, "max_model_len": 4096, "tokens": [318, 402, 17], "token_strs": None, "token_texts": None})
TEXT = answers({"prompt": "Ann has 3"})
LOADED = answers({"ok": True, "model": "Qwen/Qwen3-0.6B", "savepoints": []})
UNLOADED = answers({"ok": True, "model": "Qwen/Qwen3-0.6B"})

_SESSION: dict[str, Any] = {"id": "first-steps", "runs": 1, "tokens": 23, "bytes": 8832, "models": ["vitrine-demo"]}
_SESSION |= {"created": 1763700000.0, "updated": 1763700000.0, "pinned": False}
_SESSION |= {"owner": "ann"}  # with API keys
_NAME = "20261120T181500-5f2b0a71-000001.arrow"
_FILE = f"file:///home/ann/.vitrine/activations/ann/first-steps/{_NAME}"
_RUN: dict[str, Any] = {"run_id": "9f1c0e7a", "session_id": "first-steps", "model": "vitrine-demo"}
_RUN |= {
    "created": 1763700000.0,
    "prompt_tokens": 21,
    "tokens": 23,
    "sample_id": "q7",
    "tags": {"condition": "control"},
}
_RUN |= {"finish_reason": "stop", "file": _NAME, "offset": 0, "bytes": 8832, "owner": "ann"}
_RUN["points"] = {"layers.3.output": {"uri": _FILE, "first_row": 0, "shape": [23, 192], "dtype": "float32"}}
RUNS = answers({"object": "list", "data": [_RUN], "has_more": False})
_FILES = [{"name": _NAME, "uri": _FILE, "bytes": 8832, "sealed": True}]
SESSION = answers(_SESSION | {"runs": [_RUN], "files": _FILES, "has_more": False})
SESSIONS = answers({"object": "list", "data": [_SESSION], "has_more": False})
ARROW = "application/vnd.apache.arrow.file"


def _pages(content: dict[str, Any]) -> Responses:
    """A file in pages."""
    span = {"Content-Range": {"schema": {"type": "string"}, "example": "bytes 0-4194303/271340544"}}
    texts = (
        "it has 271340544 bytes, and an answer has 4194304 at most: request ranges",
        "the range begins after the last of 271340544 bytes",
    )
    return {
        200: {"description": "All of it, where that is at most 4 MiB.", "content": content},
        206: {"description": "The range, or its first 4 MiB.", "content": content, "headers": span},
        **failure(
            "It is larger than 4 MiB, and no `Range` is asked for.", ApiError(413, texts[0], "Range", "range_required")
        ),
        **failure("The range begins after the end.", ApiError(416, texts[1], "Range", "range_not_satisfiable")),
    }


FILE = _pages({ARROW: {"example": "an Arrow IPC file, as the store has it"}})
PINNED = answers({"id": "first-steps", "object": "session", "pinned": True})
UNPINNED = answers({"id": "first-steps", "object": "session", "pinned": False})
IS_PINNED = failure(
    "The session is pinned.",
    ApiError(409, "session 'first-steps' is pinned: unpin it before you delete it", "session_id", "session_pinned"),
)
IS_ARCHIVED = failure(
    "The file of stored runs is only in the bucket.",
    ApiError(410, "s3://bucket/ann/first-steps/...-000001.arrow has it: read it from there", None, "archived"),
)
DELETED = answers({"id": "first-steps", "object": "session", "deleted": True})

_PLACES: list[dict[str, Any]] = [
    {"name": "layers.0.attention.weights", "module": "model.layers.0.self_attn.weights", "shape": [4, "tokens"]},
    {"name": "layers.0.mlp.output", "module": "model.layers.0.mlp.output", "shape": [192]},
]
_LAYERS: dict[str, Any] = {"path": "model.layers", "class": "ModuleList"}
_LAYERS |= {"children": [{"path": "model.layers.0-5", "class": "Qwen3DecoderLayer"}]}
_MODULES: dict[str, Any] = {"path": "", "class": "Qwen3ForCausalLM"}
_MODULES |= {"children": [{"path": "model", "class": "Qwen3Model", "children": [_LAYERS]}]}
STRUCTURE = answers(
    {"id": "vitrine-demo", "object": "model.structure", "architecture": "Qwen3ForCausalLM", "layers": 6}
    | {"points": [place | {"dtype": "float32"} for place in _PLACES]}
    | {"hidden_size": 192, "max_model_len": 4096, "dtype": "float32", "modules": _MODULES}
)

_TENSORS: dict[str, Any] = {"id": "tensor-5f2b0a71c3d94e6688f1a2b3c4d5e6f7", "bytes": 848, "created": 1763700000.0}
_TENSORS |= {"tensors": {"formal": {"shape": [192], "dtype": "float32"}}, "owner": "ann"}  # with API keys
TENSORS = answers(_TENSORS)
TENSOR_FILES = answers({"object": "list", "data": [_TENSORS], "has_more": False})
TENSOR_FILE = _pages({"application/octet-stream": {"example": "a safetensors file"}})
TENSORS_DELETED = answers({"id": _TENSORS["id"], "object": "tensors", "deleted": True})

_READOUT: dict[str, Any] = {"object": "readout", "name": "truth", "model": "vitrine-demo", "point": "layers.3.output"}
_READOUT |= {"kind": "linear", "activation": "sigmoid", "labels": ["true"]}
_READOUT |= {"id": "readout-5f2b0a71c3d94e6688f1a2b3c4d5e6f7", "hidden": 192, "values": 1, "bytes": 2520}
_READOUT |= {"created": 1763700000.0, "owner": "ann"}  # with API keys
READOUT = answers(_READOUT)
READOUTS = answers({"object": "list", "data": [_READOUT], "has_more": False})
READOUT_DELETED = answers({"name": "truth", "object": "readout", "deleted": True})

_PRESET: dict[str, Any] = {"name": "formal", "object": "preset", "created": 1763700000.0}
_PRESET |= {"model": "vitrine-demo", "default": False, "description": "formal speech"}
_PRESET |= {"owner": "ann"}  # with API keys
_STEER = {"op": "add", "point": "layers.3.output", "vector": _TENSORS["id"], "scale": 4.0}
PRESET = answers(_PRESET | {"interventions": [_STEER]})
PRESETS = answers({"object": "list", "data": [_PRESET], "has_more": False})
PRESET_DELETED = answers({"name": "formal", "object": "preset", "deleted": True})

_DOWN = {"status": "unavailable", "loaded_models": [], "replicas": {"vitrine-demo": {"STARTING": 1}}}
HEALTH: Responses = {
    **answers({"status": "ok", "loaded_models": ["vitrine-demo"], "replicas": {"vitrine-demo": {"RUNNING": 1}}}),
    503: {
        "description": "A model has no replica that can serve; or, with OpenAI's body, Serve does not answer.",
        "content": {"application/json": {"schema": {"type": "object"}, "example": _DOWN}},
        "headers": errors(503)[503]["headers"],
    },
}
_JOB = {"id": "5f2b0a71c3d94e6688f1a2b3c4d5e6f7", "status": "RECEIVED", "description": ""}
JOB = answers(_JOB)
RESULT: Responses = {
    200: {
        "description": "What the block saved, as `torch.save` writes it.",
        "content": {"application/octet-stream": {"example": "saved values"}},
    }
}
_KEY = 'nnsight.modeling.transformers.TransformersModel:{"repo_id": "vitrine-demo", "revision": null, '
_DEPLOYED: dict[str, Any] = {
    "deployment_level": "HOT",
    "application_state": "RUNNING",
    "repo_id": "vitrine-demo",
    "revision": None,
}
_DEPLOYED |= {"model_key": _KEY + '"task": "text-generation"}', "task": "text-generation", "trust_remote_code": False}
STATUS = answers({"deployments": {"vitrine-demo": _DEPLOYED}})
ENVIRONMENT = answers({"python_version": "3.11.9", "packages": {"nnsight": "0.8.1", "torch": "2.13.0"}})
WHOAMI = answers({"email": None, "tags": ["use"]})
METRICS: Responses = {200: {"content": {"text/plain": {"example": 'ray_vitrine_running{model="vitrine-demo"} 0.0\n'}}}}
