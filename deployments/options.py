"""What an operator may set, in one typed place: `serve run serve_app:build_app name=value ...`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

DEMO = "vitrine-demo"


def home() -> Path:
    """Where activations and results go unless told otherwise: `$VITRINE_HOME`, else `~/.vitrine`."""
    return Path(os.environ.get("VITRINE_HOME") or "~/.vitrine").expanduser().absolute()


class Options(BaseModel):
    """One model, its replicas, and the activation store.

    Attributes:
        model: A repository id, a directory, or `vitrine-demo`, the model that ships with the project.
        model_id: The name it is served by; `model` unless given.
        revision: The repository's branch, tag or commit.
        dtype: The weights' dtype; `auto` is the checkpoint's own.
        device: `cuda`, `cpu` or a torch device; a GPU where a replica has one, else the CPU.
        device_map: How to spread the model over a replica's GPUs, as transformers takes it.
        trust_remote_code: Run the repository's own code.
        max_seq_len: A context shorter than the model's, in tokens.
        num_replicas: Copies of the model, each with its own weights.
        num_cpus: What each replica reserves in Ray. A fraction, so that on two cores the evaluator's tasks
            still find room; torch's threads are set by `threads`.
        num_gpus: GPUs of each replica.
        threads: torch threads of each replica; by default the machine's cores divided by `num_replicas`.
        max_running: The most requests of a replica that share a forward.
        max_queued: The most requests of a replica beyond those; more get 429.
        prefill_tokens: The most prompt tokens of one forward; a longer prompt goes in pieces between decodes. By
            default 512 on a CPU and 4,096 on a GPU.
        kv_bytes: The most KV memory of a replica in bytes.
        kv_fraction: The same as a part of the memory that is free at start, where `kv_bytes` is not given.
        request_timeout_s: Seconds after which a request gets 504.
        stuck_after_s: Seconds in one engine step after which a replica counts as dead and is replaced.
        max_body_bytes: The largest request body; larger ones get 413.
        capture_memory_bytes: Host memory of a replica for recorded rows on their way to the store. They go out in
            pieces; where the disk is slower than the model, requests that record wait for it.
        max_capture_bytes: The most bytes that one choice of a request may record.
        max_inline_values: The most numbers that `"return": "inline"` may put into an answer.
        activations_dir: Where activations are stored.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str = Field(default=DEMO, min_length=1)
    model_id: str | None = Field(default=None, min_length=1, max_length=256)
    revision: str | None = None
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: str | None = None
    device_map: str | dict[str, Any] | None = None
    trust_remote_code: bool = False
    max_seq_len: int | None = Field(default=None, ge=2)
    num_replicas: int = Field(default=1, ge=1)
    num_cpus: float = Field(default=0.5, ge=0)
    num_gpus: float = Field(default=0, ge=0)
    threads: int | None = Field(default=None, ge=1)
    max_running: int = Field(default=64, ge=1)
    max_queued: int = Field(default=1024, ge=0)
    prefill_tokens: int | None = Field(default=None, ge=1)
    kv_bytes: int | None = Field(default=None, ge=1)
    kv_fraction: float = Field(default=0.5, gt=0, le=1)
    request_timeout_s: float = Field(default=600, gt=0)
    stuck_after_s: float = Field(default=300, gt=0)
    max_body_bytes: int = Field(default=16 << 20, ge=1)
    max_inline_values: int = Field(default=200_000, ge=1)
    capture_memory_bytes: int = Field(default=128 << 20, ge=1)
    max_capture_bytes: int = Field(default=4 << 30, ge=1)
    activations_dir: str = Field(default_factory=lambda: str(home() / "activations"))

    @field_validator("activations_dir")
    @classmethod
    def _is_absolute(cls, value: str) -> str:
        path = Path(value).expanduser()
        if not path.is_absolute():
            raise ValueError("must be an absolute path: the actors that use it have other working directories")
        return str(path)

    @property
    def served_name(self) -> str:
        """The id that clients name the model by."""
        return self.model_id or self.model
