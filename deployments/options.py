"""An operator's options, in one typed place: `serve run serve_app:build_app name=value ...`."""

from __future__ import annotations

import itertools
import json
import os
import re
from pathlib import Path
from typing import Any, Literal

from pydantic import (
    BaseModel,
    ByteSize,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    field_validator,
    model_validator,
)

from deployments.conditions import Monitor
from deployments.errors import nearest
from deployments.savepoint import Savepoint
from deployments.scaling import Autoscaling
from deployments.uris import check_uri

DEMO = "vitrine-demo"
NO_MODEL = "none"
SMOLLM2 = "smollm2"
STORE_VARIABLE = "VITRINE_ACTIVATIONS"
GGUF = ".gguf"
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Attention = Literal["auto", "eager", "sdpa"]


def home() -> Path:
    """The default directory of activations and results: `$VITRINE_HOME`, else `~/.vitrine`."""
    return Path(os.environ.get("VITRINE_HOME") or "~/.vitrine").expanduser().absolute()


def default_store() -> str:
    """The default store of readers: `$VITRINE_ACTIVATIONS`, else the server's default.

    It may be a directory, a URI of object storage, or a server's `http` address.
    """
    return os.environ.get(STORE_VARIABLE) or str(home() / "activations")


def default_models_dir() -> Path:
    """The default directory of models that are named without a path: `$VITRINE_HOME/models`."""
    return home() / "models"


def fits_header(key: str) -> bool:
    """Whether an HTTP header can hold an API key: printable ASCII without spaces around it."""
    return key.isascii() and key.isprintable() and key == key.strip()


class Options(BaseModel):
    """One model, its replicas, and the activation store.

    Attributes:
        model: A repository id, a name below `models_dir`, the absolute path of a directory or of a GGUF file,
            `vitrine-demo` (the model that ships with the project), or `none` to start without a model.
        model_id: The name that requests give as `model`, and that `/v1/models` and stored runs show. By default it is
            `model` itself, with an adapter `model+adapter`; of a path it is the last name, without `.gguf`.
        revision: The repository's branch, tag or commit.
        adapter: A LoRA adapter in PEFT's format, which is merged into the weights: a repository id, a name below
            `models_dir`, or the absolute path of a directory.
        dtype: The weights' dtype; `auto` is the checkpoint's own. In 16 bits, a request's tokens may depend on the
            other requests of its batch: use `float32` for experiments if the model is small enough. A processor without
            instructions for bfloat16 is several times slower in it than in `float32`.
        attention: How transformers computes attention; `auto` is its choice for the model. `sdpa` is faster. `eager`
            gives attention patterns also for architectures whose patterns cannot be recomputed.
        device: `cuda`, `cpu` or a torch device; by default a GPU if the replica has one, else the CPU.
        device_map: How to spread the model over a replica's GPUs, as transformers takes it.
        trust_remote_code: Run the repository's own code.
        max_seq_len: A context shorter than the model's, in tokens.
        savepoints: Points of the model with names of their own. `store_activations` without `capture` records them.
        num_replicas: Copies of the model, each with its own weights.
        autoscaling: Fields of Ray Serve's `AutoscalingConfig` instead of `num_replicas`, such as `{"min_replicas": 0,
            "max_replicas": 4}`: Serve then starts and stops replicas with the load. By default,
            `target_ongoing_requests` is 0.75 of `max_running`, and at least one replica starts.
        max_surge_percent: Further replicas, in percent of all, that a redeployment starts before it stops old ones;
            they need CPUs, GPUs and memory beside the old ones.
        num_cpus: CPUs that each replica reserves in Ray. The default is a fraction, so that on two cores the
            evaluator's tasks also find room. `threads` sets torch's threads.
        num_gpus: GPUs of each replica; by default 1 where the cluster has a GPU, else 0. With a fraction, such as 0.5,
            replicas share a GPU.
        threads: torch threads of each replica; by default the machine's cores divided by the most replicas.
        batch_invariant: Give each sequence the same bits (tokens, logprobs, activations) whatever shares its forward
            passes, on the same machine. On CPUs, in float32 and bfloat16; prompts run more slowly.
        cuda_graphs: Whether a GPU replays decode steps as CUDA graphs, where they can be captured, and launches each
            before the tokens of the last are known (`auto`), or runs every operation by itself (`off`).
        max_running: The most sequences of a replica that share a forward pass.
        max_queued: The most further sequences that wait in a replica's queue; more get 429.
        prefill_tokens: The most prompt tokens of one forward pass; at most a fifth of it while streams decode. A
            longer prompt runs in chunks. By default 1,024 on a CPU and 4,096 on a GPU.
        kv_fraction: The most memory for keys and values of a replica: a fraction of what is free at start, which
            replicas on CPUs, and those that share a GPU, divide among them; or a size such as `2GiB`.
        request_timeout_s: Seconds after which a request gets 504.
        requests_per_minute: The most chats and completions of each owner of API keys, admins as well; more get 429.
            Without keys, of all clients together. By default no limit.
        tokens_per_minute: The same for tokens of prompts and answers, counted when a request ends. By default no limit.
        api_keys_file: A file of API keys, each as `role:key` or `role@name:key`, where the application is built and on
            Ray's head node, which reads it again when it changes. The variable `VITRINE_API_KEYS` is read when the
            application is built.
        open: Start without API keys on addresses that other machines can reach, and answer everybody.
        insecure_ray: Start on a Ray cluster without token authentication. Everybody who reaches its ports can run code.
        allowed_hosts: Names by which requests may call a server without API keys, besides localhost and loopback
            addresses; `*` is any. Behind a proxy that serves other machines, the names by which they call the proxy.
        cors_origins: Origins whose pages may read answers; none by default. `*` is any, and needs API keys.
        max_client_store_bytes: The most bytes of all tensor files that clients store, and as many of all readouts and
            of all lenses. One file may take a sixteenth of it: a tensor file at most 64 MiB, a readout or lens at most
            1 GiB; larger ones get 413.
        max_request_tensor_bytes: The most bytes that a replica's requests hold together of vectors, tensors and stored
            rows for interventions, and as many of readouts' and lenses' tensors on its device.
        capture_memory_bytes: Host memory of a replica for recorded rows on their way to the store. If the disk is
            slower than the model, requests that record wait for it.
        max_capture_bytes: The most bytes that one request may record, all its choices together.
        max_store_bytes: The most bytes of all stored sessions together; runs that do not fit are not stored. By default
            no limit but the disk's.
        max_session_bytes: The most bytes stored for one session.
        max_session_age_s: Seconds since its last run after which a session is deleted, unless it is pinned; by default
            none is.
        delete_oldest: Whether at `max_store_bytes` the store deletes the sessions whose last run is oldest, except
            pinned ones, instead of rejecting the run. With API keys, it deletes only those of the run's owner.
        activations_dir: The directory where activations and clients' tensors are stored.
        archive: The URI of a bucket that stored activations are uploaded to as well (`s3://bucket/prefix?region=...`);
            by default none.
        archive_cache_bytes: The most bytes of archived activations that stay in `activations_dir`; the oldest are
            removed first.
        models_dir: The directory of models that are named without a path: `some/model` loads `models_dir/some/model`
            if it exists, else from the hub. By default `$VITRINE_HOME/models`, where `make smollm2` writes.
        allow_remote_code: Whether a model may be loaded with `trust_remote_code` while the server runs.
        load_timeout_s: Seconds after which loading a model is given up.
        allow_client_code: Whether clients may run nnsight code of their own over the served weights; with API keys,
            those of the roles `code` and `admin`. Without keys it is rejected, unless only this machine can reach the
            server.
        client_code_sandbox: How that code is isolated. `auto` uses every layer that the system supports, and is
            rejected if the system cannot isolate code and other machines reach the server. `none` runs code as the
            server's user.
        client_code_timeout_s: Seconds after which a client's job is stopped.
        client_code_memory_bytes: Host memory of a client's job beyond the weights, which it shares. Its result may
            have a sixteenth of it.
        monitors: Readouts that read every chat and completion. No field of a request switches them off.
            `docs/readouts.md` describes their fields.
        monitor_log: A directory of JSON lines, one for each answer, with what the monitors read. By default none.
        public_url: The server's address as clients reach it, if their requests do not show it, for example behind a
            proxy that ends TLS. Large results of clients' jobs are fetched from it, and `/v1/models` shows it, so it
            must not have a user, key or query.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)  # a URI may hold a key

    model: str = Field(default=DEMO, min_length=1)
    model_id: str | None = Field(default=None, min_length=1, max_length=256)
    revision: str | None = None
    adapter: str | None = Field(default=None, min_length=1)
    dtype: Dtype = "auto"
    attention: Attention = "auto"
    device: str | None = None
    device_map: str | dict[str, Any] | None = None
    trust_remote_code: bool = False
    max_seq_len: int | None = Field(default=None, ge=2)
    savepoints: tuple[Savepoint, ...] = Field(default=(), max_length=256)
    num_replicas: int = Field(default=1, ge=1)
    autoscaling: Autoscaling = None
    max_surge_percent: int = Field(default=0, ge=0, le=100)
    num_cpus: float = Field(default=0.5, ge=0)
    num_gpus: float | None = Field(default=None, ge=0)
    threads: int | None = Field(default=None, ge=1)
    batch_invariant: bool = False
    cuda_graphs: Literal["auto", "off"] = "auto"
    max_running: int = Field(default=64, ge=1)
    max_queued: int = Field(default=1024, ge=0)
    prefill_tokens: int | None = Field(default=None, ge=1)
    kv_fraction: float | str = 0.5
    request_timeout_s: float = Field(default=600, gt=0)
    requests_per_minute: int | None = Field(default=None, ge=1)
    tokens_per_minute: int | None = Field(default=None, ge=1)
    api_keys_file: str | None = Field(default=None, min_length=1)
    open: bool = False
    insecure_ray: bool = False
    allowed_hosts: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    max_client_store_bytes: int = Field(default=4 << 30, ge=1)
    max_request_tensor_bytes: int = Field(default=1 << 30, ge=1)
    capture_memory_bytes: int = Field(default=192 << 20, ge=1)
    max_capture_bytes: int = Field(default=4 << 30, ge=1)
    max_store_bytes: int | None = Field(default=None, ge=1)
    max_session_bytes: int | None = Field(default=None, ge=1)
    max_session_age_s: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    delete_oldest: bool = False
    activations_dir: str = Field(default_factory=lambda: str(home() / "activations"))
    archive: str | None = Field(default=None, min_length=1)
    archive_cache_bytes: int = Field(default=64 << 30, ge=0)
    models_dir: str = Field(default_factory=lambda: str(default_models_dir()))
    allow_remote_code: bool = False
    load_timeout_s: float = Field(default=600, gt=0)
    allow_client_code: bool = False
    client_code_sandbox: Literal["auto", "none"] = "auto"
    client_code_timeout_s: float = Field(default=300, gt=0)
    client_code_memory_bytes: int = Field(default=4 << 30, ge=1)
    monitors: tuple[Monitor, ...] = Field(default=(), max_length=64)
    monitor_log: str | None = Field(default=None, pattern="^[/~]")
    public_url: str | None = Field(default=None, pattern=r"^https?://[^\s]+[^/\s]$")

    @field_validator("allowed_hosts", "cors_origins", mode="before")
    @classmethod
    def _apart_by_commas(cls, value: Any) -> Any:
        return tuple(filter(None, map(str.strip, value.split(",")))) if isinstance(value, str) else value

    @field_validator("cors_origins")
    @classmethod
    def _are_origins(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for origin in value:
            if not re.fullmatch(r"\*|https?://[^/\s]+", origin):
                raise ValueError(f"{origin!r} is not an origin: write scheme://host or scheme://host:port")
        return value

    @field_validator("allowed_hosts")
    @classmethod
    def _are_hosts(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for host in value:
            if not re.fullmatch(r"\*|[A-Za-z0-9._-]+|[0-9A-Fa-f:]+", host):
                raise ValueError(f"{host!r} is not a host: give a name or an address, without a port")
        return tuple(host.lower() for host in value)

    @field_validator("kv_fraction", mode="before")
    @classmethod
    def _is_a_fraction_or_a_size(cls, value: Any) -> Any:
        try:
            number = float(value)
            fits, value = number > 0 and (number <= 1 or number.is_integer()), number
            value = f"{int(number)}B" if number > 1 else number
        except (TypeError, ValueError):
            fits = _bytes_of(value) is not None
        if not fits:
            raise ValueError("must be above 0 and at most 1, or a size such as 2GiB")
        return value

    @field_validator("models_dir")
    @classmethod
    def _is_no_uri(cls, value: str) -> str:
        if "://" in value:
            raise ValueError("must be a directory")
        return value

    @field_validator("archive")
    @classmethod
    def _is_a_bucket(cls, value: str | None) -> str | None:
        if value is None:
            return None
        if "://" not in value or value.startswith("file:"):
            raise ValueError("must be the URI of a bucket, such as s3://bucket/prefix?region=us-east-1")
        return check_uri(value)

    @field_validator("activations_dir", "models_dir")
    @classmethod
    def _is_absolute(cls, value: str) -> str:
        if "://" in value or value.startswith("file:"):
            raise ValueError(
                "must be a directory, such as /data/activations; for a bucket, set archive as well: "
                "activations_dir=/data/activations archive=s3://bucket/prefix"
            )
        path = Path(value).expanduser()
        if not path.is_absolute():
            raise ValueError("must be an absolute path: the actors that use it have other working directories")
        return str(path)

    @field_validator("public_url")
    @classmethod
    def _holds_no_key(cls, value: str | None) -> str | None:
        # Not by its parts: a password with an unescaped '/' in it looks like a path.
        if value and any(mark in value for mark in "@?#"):
            raise ValueError(
                "must be scheme://host[:port][/path] without a user, password, query or fragment, since answers show "
                "it: leave out the parts before '@' and after '?' or '#'; in a path write '@' as %40"
            )
        return value

    @field_validator("autoscaling", "monitors", "savepoints", mode="before")
    @classmethod
    def _reads_json(cls, value: Any) -> Any:
        """An argument of `serve run` is text."""
        return json.loads(value) if isinstance(value, str) else value

    @field_validator("monitors")
    @classmethod
    def _have_names_of_their_own(cls, value: tuple[Monitor, ...]) -> tuple[Monitor, ...]:
        for one, other in itertools.combinations(value, 2):
            if one.called == other.called and (one.model is None or other.model in (None, one.model)):
                raise ValueError(f"two monitors are called {one.called!r}: set the field name of one of them")
        return value

    @model_validator(mode="after")
    def _fits_serve(self) -> Options:
        if self.num_gpus and self.num_gpus > 1 and not self.num_gpus.is_integer():
            raise ValueError("num_gpus must be at most 1, or whole: replicas with several GPUs share none")
        if self.autoscaling is not None and self.num_replicas != 1:
            raise ValueError("set either num_replicas or autoscaling, which has min_replicas and max_replicas")
        return self

    @property
    def most_replicas(self) -> int:
        """The most replicas at the same time, except during a redeployment."""
        return self.num_replicas if self.autoscaling is None else int(self.autoscaling.get("max_replicas", 1))

    @property
    def kv_bytes(self) -> int | None:
        """The size in `kv_fraction`, if it is one."""
        return _bytes_of(self.kv_fraction) if isinstance(self.kv_fraction, str) else None

    @property
    def max_tensor_file_bytes(self) -> int:
        """The most bytes of a tensor file, whose messages Serve limits."""
        return min(self.max_client_store_bytes // 16, 64 << 20)

    @property
    def max_readout_file_bytes(self) -> int:
        """The most bytes of a readout with its form; the ingress holds it in memory while it is sent."""
        return min(self.max_client_store_bytes // 16, 1 << 30)

    @property
    def on_cpu(self) -> bool:
        """Whether `device` or `device_map` chooses the CPU."""
        return "cpu" in (self.device, self.device_map)

    @property
    def served_name(self) -> str:
        """The id that clients name the model by: of paths their last names."""
        return self.model_id or adapted(_short(self.model), self.adapter and _short(self.adapter))

    def of_another(self, model: str, settings: dict[str, Any]) -> Options:
        """The options of another model that this server loads: the same resources, and its own settings.

        Args:
            model: Its name.
            settings: Some of `SETTINGS`; the others are at their defaults.
        """
        kept = self.model_dump(exclude=SETTINGS | {"model_id"})
        return Options.model_validate(kept | {"model": model} | settings)


def adapted(model: str, adapter: str | None) -> str:
    """The id of a model with an adapter in its weights. No repository's id has a `+`."""
    return f"{model}+{adapter}" if adapter else model


def _short(name: str) -> str:
    return Path(name).name.removesuffix(GGUF) or name if name.startswith(("/", "~")) else name


def _bytes_of(value: Any) -> int | None:
    """The bytes of a size such as `2GiB`; None if it is none."""
    try:
        return TypeAdapter(ByteSize).validate_python(value) or None
    except ValidationError:
        return None


SETTINGS = {
    "revision",
    "adapter",
    "dtype",
    "attention",
    "device_map",
    "trust_remote_code",
    "max_seq_len",
    "num_replicas",
    "autoscaling",
    "savepoints",
}
"""The options for loading one model."""


def mistakes(error: ValidationError) -> list[tuple[str, str]]:
    """All mistakes in options, each as the option's path and what to do, without the value: it may hold a key."""
    listed = []
    for mistake in error.errors(include_url=False, include_input=False):
        name = ".".join(map(str, mistake["loc"])) or "options"
        message = mistake["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
        message = message.split(", unable to")[0]
        if mistake["type"] == "extra_forbidden":
            known = Options.model_fields if len(mistake["loc"]) == 1 else Savepoint.model_fields
            message = f"there is no such option{nearest(str(mistake['loc'][-1]), known)}"
        listed.append((name, message))
    return listed
