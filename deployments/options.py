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
        model: Repository id, name below `models_dir`, absolute path of a directory or GGUF file, `vitrine-demo` (the
            bundled model), or `none` to start without a model.
        model_id: Name of the model in requests, `/v1/models` and stored runs. By default the value of `model`, or
            `model+adapter` with an adapter. For a path: its last component, without `.gguf`.
        revision: Branch, tag or commit of the repository.
        adapter: LoRA adapter in PEFT format, merged into the weights: repository id, name below `models_dir`, or
            absolute path of a directory.
        dtype: Dtype of the weights; `auto` uses that of the checkpoint. In 16 bits, tokens may depend on the other
            requests of a batch: use `float32` for experiments if the model is small enough. CPUs without bfloat16
            instructions run bfloat16 several times slower than `float32`.
        attention: Attention implementation of transformers; `auto` lets transformers choose. `sdpa` is faster. `eager`
            also gives attention patterns for architectures whose patterns cannot be recomputed.
        device: `cuda`, `cpu` or another torch device. By default a GPU if the replica has one, else the CPU.
        device_map: Distribution of the model over the GPUs of a replica, in transformers' form; an object only in a
            file.
        trust_remote_code: Run Python code from the model's repository.
        max_seq_len: Context length in tokens, if shorter than that of the model.
        savepoints: Aliases of points, each with `name` and `selector`. `store_activations` without `capture` records
            these points.
        num_replicas: Number of replicas; each contains a copy of the model.
        autoscaling: Fields of Ray Serve's `AutoscalingConfig` instead of `num_replicas`, such as `{"min_replicas": 0,
            "max_replicas": 4}`: Serve starts and stops replicas with the load. By default,
            `target_ongoing_requests` is 0.75 of `max_running`, and at least one replica starts.
        max_surge_percent: Additional replicas, in percent of all, that a redeployment starts before it stops old ones.
            They need CPUs, GPUs and memory in addition to those of the old replicas.
        num_cpus: CPUs that each replica reserves in Ray; `threads` sets the threads of torch. The default is a
            fraction so that evaluation tasks also fit on two cores.
        num_gpus: GPUs of each replica. By default 1 if the cluster has a GPU, else 0. With a fraction, such as 0.5,
            replicas share a GPU.
        threads: Torch threads of each replica. By default the cores of the machine divided by the maximum number of
            replicas.
        batch_invariant: Give each sequence the same bits (tokens, logprobs, activations) in every batch composition, on
            the same machine. On CPUs, in float32 and bfloat16; prompts run more slowly.
        cuda_graphs: `auto` replays decode steps on a GPU as CUDA graphs if they can be captured, and launches each step
            before the tokens of the last one are known. `off` launches every operation separately.
        max_running: Maximum sequences of a replica in one forward pass.
        max_queued: Maximum further sequences in a replica's queue. The server rejects more with 429.
        prefill_tokens: Maximum prompt tokens of one forward pass, or a fifth of it while streams decode. Longer prompts
            run in chunks. By default 1,024 on a CPU and 4,096 on a GPU.
        kv_fraction: Maximum memory of a replica for keys and values: a fraction of the memory that is free at start, or
            a size such as `2GiB`. Replicas on CPUs, and replicas that share a GPU, divide the fraction.
        request_timeout_s: Seconds after which the server ends a request with 504.
        requests_per_minute: Maximum chats, completions and attributions per owner of API keys, including admins;
            without keys, of all clients together. The server rejects more with 429. By default no limit.
        tokens_per_minute: Maximum prompt and completion tokens per owner of API keys, including admins; without keys,
            of all clients together. Counted when a request ends. By default no limit.
        api_keys_file: File of API keys, one `role:key` or `role@name:key` per line, on the machine that builds the
            application and on Ray's head node, which rereads it after changes. The variable `VITRINE_API_KEYS` is read
            only when the application is built.
        open: Start without API keys on addresses that other machines can reach. Everybody can then use the server.
        insecure_ray: Start on a Ray cluster without token authentication. Everybody who reaches its ports can run code.
        allowed_hosts: Host names, besides localhost and loopback addresses, by which clients may call a server without
            API keys; `*` allows any. Behind a proxy: the names by which clients call the proxy.
        cors_origins: Origins whose web pages may read responses. By default none; `*` allows any, and needs API keys.
        max_client_store_bytes: Maximum bytes of all tensor files from clients, and likewise of all readouts and of all
            lenses, of which each owner of API keys leaves as much as it takes. One file may take a sixteenth of it, a
            tensor file at most 64 MiB, a readout or lens at most 1 GiB. The server rejects larger files with 413.
        max_request_tensor_bytes: Maximum bytes of vectors, tensors and stored activations for interventions, over all
            requests of a replica; and likewise of the tensors of readouts and lenses on its device.
        capture_memory_bytes: Host memory of a replica for recorded activations on their way to the store. If the disk
            is slower than the model, requests that record wait for it.
        max_capture_bytes: Maximum bytes that one request may record, over all its choices.
        max_store_bytes: Maximum bytes of all stored sessions. Runs above it get the status `failed`. By default
            only the disk limits them.
        max_session_bytes: Maximum bytes of one stored session. By default no limit.
        max_session_age_s: Seconds since its last run after which the store deletes a session, unless it is pinned. By
            default sessions have no age limit.
        delete_oldest: At `max_store_bytes`, delete the unpinned sessions with the oldest last runs instead of rejecting
            the run. With API keys, only sessions of the run's owner.
        activations_dir: Directory of stored activations and of clients' tensors.
        archive: URI of a bucket (`s3://bucket/prefix?region=...`) to which the store also uploads activations. By
            default none.
        archive_cache_bytes: Maximum bytes of archived activations that stay in `activations_dir`. The store removes the
            oldest first.
        models_dir: Directory of models that are named without a path: `some/model` loads `models_dir/some/model` if it
            exists, else the repository. By default `$VITRINE_HOME/models`, the directory of `make smollm2`.
        allow_remote_code: Allow `trust_remote_code` for models that are loaded while the server runs.
        load_timeout_s: Seconds after which the server gives up loading a model.
        allow_client_code: Run clients' nnsight code over the served weights; with API keys, that of the roles `code`
            and `admin`. Without keys, the server starts with it only if no other machine can reach it.
        client_code_sandbox: Isolation of remote nnsight code. `auto` uses every layer that the system supports; no
            model loads if the system cannot isolate code and other machines can reach the server. `none` runs code as
            the server's user.
        client_code_timeout_s: Seconds after which the server stops an nnsight job.
        client_code_memory_bytes: Host memory of an nnsight job, in addition to the shared weights. Its result may take
            a sixteenth of it.
        monitors: Readouts that read every chat and completion; no field of a request switches them off.
            `docs/readouts.md` describes their fields.
        monitor_log: Directory of JSON Lines files with one line per response: the values of the monitors. By default
            none.
        public_url: Address of the server for clients, if their requests do not show it, such as behind a proxy that
            ends TLS. Clients fetch large nnsight results from it, and `/v1/models` shows it: it must not contain a
            user, a key or a query.
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
        """The most bytes of a readout with its form."""
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
