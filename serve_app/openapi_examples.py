"""Examples of requests and answers in `/openapi.json`."""

from __future__ import annotations

import json
from typing import Any

from serve_app.http.errors import ApiError
from serve_app.openapi import Responses, errors, failure


def answers(example: Any, streamed: dict[str, Any] | None = None) -> Responses:
    """A successful answer with an example; if the route streams, also an example of its events."""
    content: dict[str, Any] = {"application/json": {"schema": {"type": "object"}, "example": example}}
    if streamed is not None:
        event = f"data: {json.dumps(streamed)}\n\n"
        event = f"event: {streamed['type']}\n{event}" if "type" in streamed else f"{event}data: [DONE]\n\n"
        content["text/event-stream"] = {"example": event}
    return {200: {"description": "With `stream`, as events." if streamed else "Done.", "content": content}}


def _listed(item: dict[str, Any]) -> Responses:
    return answers({"object": "list", "data": [item], "has_more": False})


def _file(kind: str, example: str) -> Responses:
    content = {kind: {"example": example}}
    span = {"Content-Range": {"schema": {"type": "string"}, "example": "bytes 0-4194303/271340544"}}
    too_large = ApiError(413, "an answer has at most 4194304 bytes: request ranges", "Range", "range_required")
    too_late = ApiError(416, "the range begins after the last byte", "Range", "range_not_satisfiable")
    return {
        200: {"description": "All of it, where that is at most 4 MiB.", "content": content},
        206: {"description": "The range, or its first 4 MiB.", "content": content, "headers": span},
        **failure("It is larger than 4 MiB, and no `Range` is asked for.", too_large),
        **failure("The range begins after the end.", too_late),
    }


ID, WHEN, NAME = "vitrine-demo", 1763700000, "20261120T181500-5f2b0a71-000001.arrow"
ARROW, BYTES = "application/vnd.apache.arrow.file", "application/octet-stream"

USAGE = {"prompt_tokens": 21, "completion_tokens": 2, "total_tokens": 23}
HEAD = {"id": "chatcmpl-5f2b", "object": "chat.completion", "created": WHEN, "model": ID}
END: dict[str, Any] = {"index": 0, "finish_reason": "stop", "logprobs": None}
CHAT = answers(
    HEAD | {"choices": [END | {"message": {"role": "assistant", "content": "36"}}], "usage": USAGE},
    HEAD | {"object": "chat.completion.chunk", "choices": [END | {"delta": {"content": "36"}}]},
)
TEXT_HEAD = HEAD | {"id": "cmpl-5f2b", "object": "text_completion", "choices": [END | {"text": " 36"}]}
COMPLETION = answers(TEXT_HEAD | {"usage": USAGE}, TEXT_HEAD)

_ASKED = {"model": ID, "messages": [{"role": "user", "content": "How many pens are 3 boxes of 12?"}], "max_tokens": 64}
_CAPTURE = {"capture": {"points": ["layers.1.output", "layers.3.output"]}, "session_id": "first-steps"}
CHAT_EXAMPLES: dict[str, Any] = {
    "streamed": {"value": _ASKED | {"stream": True}},
    "activations": {"summary": "records two layers' outputs for every token", "value": _ASKED | _CAPTURE},
    "logit lens": {
        "summary": "two layers' top tokens at the position that predicts each token",
        "value": _ASKED | {"logit_lens": {"layers": [1, -1], "top_k": 3}},
    },
}
COMPLETION_EXAMPLES: dict[str, Any] = {"texts": {"value": {"model": ID, "prompt": ["Ann has", "Tom has"], "n": 2}}}

_ITEM = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "36"}]}
_RESPONSE = {"id": "resp_5f2b", "object": "response", "model": ID, "status": "completed", "output": [_ITEM]}
RESPONSE = answers(_RESPONSE)
RESPONSE_STREAMED = answers(_RESPONSE, {"type": "response.output_text.delta", "delta": "36", "output_index": 0})
_QUESTION = {"model": ID, "input": "How many pens are 3 boxes of 12?", "max_output_tokens": 64, "stream": True}
RESPONSE_EXAMPLES: dict[str, Any] = {"streamed": {"value": _QUESTION}}
RESPONSE_DELETED = answers({"id": "resp_5f2b", "object": "response", "deleted": True})

_MODEL: dict[str, Any] = {"id": ID, "object": "model", "owned_by": "vitrine", "created": WHEN, "max_model_len": 4096}
MODEL = answers(_MODEL)
MODELS = answers({"object": "list", "data": [_MODEL]})
TOKENS = answers({"count": 3, "max_model_len": 4096, "tokens": [318, 402, 17], "token_strs": None, "token_texts": None})
TEXT = answers({"prompt": "Ann has 3"})
LOADED = answers({"ok": True, "model": "Qwen/Qwen3-0.6B", "savepoints": []})
UNLOADED = answers({"ok": True, "model": "Qwen/Qwen3-0.6B"})
STRUCTURE = answers(
    {"id": ID, "object": "model.structure", "architecture": "Qwen3ForCausalLM", "layers": 6, "hidden_size": 192}
    | {"layer_kinds": ["full_attention"] * 6}
    | {"points": [{"name": "layers.0.mlp.output", "module": "model.layers.0.mlp.output", "shape": [192]}]}
)

ATTRIBUTION = answers(
    {"object": "model.attribution", "model": ID, "logit": 7.5}
    | {"parts": [{"name": "embed", "values": [0.5]}, {"name": "layers.0.attention.heads", "values": [3.0, 4.0]}]}
)

_SESSION = {"id": "first-steps", "runs": 1, "tokens": 23, "bytes": 8832, "models": [ID], "pinned": False}
_URI = f"file:///home/ann/.vitrine/activations/ann/first-steps/{NAME}"
_POINTS = {"layers.3.output": {"uri": _URI, "first_row": 0, "shape": [23, 192], "dtype": "float32"}}
_RUN = {"run_id": "9f1c0e7a", "session_id": "first-steps", "model": ID, "created": WHEN, "tokens": 23}
_RUN |= {"tags": {"condition": "control"}, "file": NAME, "offset": 0, "bytes": 8832, "points": _POINTS}
RUNS, SESSIONS = _listed(_RUN), _listed(_SESSION)
_FILES = [{"name": NAME, "uri": _URI, "bytes": 8832, "sealed": True}]
SESSION = answers(_SESSION | {"runs": [_RUN], "files": _FILES, "has_more": False})
FILE = _file(ARROW, "an Arrow IPC file, as the store has it")
PINNED, UNPINNED = (answers({"id": "first-steps", "object": "session", "pinned": pinned}) for pinned in (True, False))
IS_PINNED = failure("It is pinned.", ApiError(409, "'first-steps' is pinned: unpin it", "session_id", "session_pinned"))
IS_ARCHIVED = failure("Only the bucket has the file.", ApiError(410, f"s3://bucket/{NAME} has it", None, "archived"))
DELETED = answers({"id": "first-steps", "object": "session", "deleted": True})

_TENSORS: dict[str, Any] = {"id": "tensor-5f2b0a71c3d94e6688f1a2b3c4d5e6f7", "bytes": 848, "created": WHEN}
_TENSORS |= {"tensors": {"formal": {"shape": [192], "dtype": "float32"}}}
TENSORS, TENSOR_FILES = answers(_TENSORS), _listed(_TENSORS)
TENSOR_BODY = {
    "requestBody": {"required": True, "content": {BYTES: {"schema": {"type": "string", "format": "binary"}}}}
}
TENSOR_FILE = _file(BYTES, "a safetensors file")
TENSORS_DELETED = answers({"id": _TENSORS["id"], "object": "tensors", "deleted": True})

_READOUT: dict[str, Any] = {"object": "readout", "name": "truth", "model": ID, "point": "layers.3.output"}
_READOUT |= {"kind": "linear", "activation": "sigmoid", "labels": ["true"], "hidden": 192, "values": 1, "bytes": 2520}
READOUT, READOUTS = answers(_READOUT), _listed(_READOUT)
READOUT_DELETED = answers({"name": "truth", "object": "readout", "deleted": True})

_LENS = {"object": "lens", "name": "tuned", "model": ID, "kind": "tuned", "hidden": 192, "layers": [0, 1, 2, 3, 4]}
LENS, LENSES = answers(_LENS), _listed(_LENS)
LENS_DELETED = answers({"name": "tuned", "object": "lens", "deleted": True})

_PRESET: dict[str, Any] = {"name": "formal", "object": "preset", "created": WHEN, "model": ID, "default": False}
_STEER = {"op": "add", "point": "layers.3.output", "vector": _TENSORS["id"], "scale": 4.0}
PRESET, PRESETS = answers(_PRESET | {"interventions": [_STEER]}), _listed(_PRESET)
PRESET_DELETED = answers({"name": "formal", "object": "preset", "deleted": True})

HEALTH: Responses = {
    **answers({"status": "ok", "loaded_models": [ID], "replicas": {ID: {"RUNNING": 1}}}),
    503: {
        "description": "A model has no replica that can serve, or Serve does not answer.",
        "content": {"application/json": {"schema": {"type": "object"}, "example": {"status": "unavailable"}}},
        "headers": errors(503)[503]["headers"],
    },
}
_USED = {"owner": "ann", "requests": 12, "prompt_tokens": 252, "completion_tokens": 24}
USAGE_BY_OWNER = answers({"object": "list", "data": [_USED]})
METRICS: Responses = {200: {"content": {"text/plain": {"example": 'ray_vitrine_running{model="vitrine-demo"} 0.0\n'}}}}

JOB = answers({"id": "5f2b0a71c3d94e6688f1a2b3c4d5e6f7", "status": "RECEIVED", "description": ""})
RESULT: Responses = {200: {"description": "By `torch.save`.", "content": {BYTES: {"example": "saved values"}}}}
STATUS = answers({"deployments": {ID: {"deployment_level": "HOT", "application_state": "RUNNING", "repo_id": ID}}})
ENVIRONMENT = answers({"python_version": "3.11.9", "packages": {"nnsight": "0.8.1", "torch": "2.13.0"}})
WHOAMI = answers({"email": None, "tags": ["use"]})
