"""What one evaluation run is told: the options of `python -m evals.gsm8k`, checked and frozen."""

import argparse
import os
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import ConfigDict, Field, ValidationError, field_validator, model_validator

from deployments.options import home
from evals.serving_config import ServingConfig, add_serving_options

Mode = Literal["no-tools", "with-tools"]
HUB_DATASET = "openai/gsm8k"


class EvalError(Exception):
    """What stops a run; the text is for the user."""


class Config(ServingConfig):
    """All that a run is told. `model`, `results_dir` and `session_id` are never empty once it starts."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    base_url: str = Field("http://127.0.0.1:8000/v1", pattern=r"^https?://.+")
    model: str = ""
    dataset: str = "demo"
    split: str = "test"
    samples: int | None = Field(None, ge=1)
    seed: int | None = None
    mode: Mode | Literal["both"] = "both"
    parallel: int = Field(16, ge=1)
    max_tokens: int = Field(512, ge=1)  # per turn
    max_turns: int = Field(12, ge=1)
    temperature: float = Field(0.0, ge=0.0)
    timeout: float = Field(300.0, gt=0.0)  # seconds, one attempt of one request
    retries: int = Field(8, ge=0)
    collect_activations: bool = False
    points: tuple[str, ...] = ()
    layers: tuple[int, ...] | Literal["all"] = ()
    sites: tuple[str, ...] = ()
    session_id: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,128}$")]
    results_dir: Path
    wait_healthy: float = Field(0.0, ge=0.0)  # seconds

    @property
    def modes(self) -> tuple[Mode, ...]:
        """The modes to run, in order."""
        return ("no-tools", "with-tools") if self.mode == "both" else (self.mode,)

    @field_validator("base_url")
    @classmethod
    def _without_slash(cls, value: str) -> str:
        return value.rstrip("/")

    @field_validator("points", "sites", mode="before")
    @classmethod
    def _split_names(cls, value: object) -> object:
        return tuple(part.strip() for part in value.split(",")) if isinstance(value, str) else value

    @field_validator("layers", mode="before")
    @classmethod
    def _split_layers(cls, value: object) -> object:
        return value.split(",") if isinstance(value, str) and value != "all" else value

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if bool(self.layers) != bool(self.sites):
            raise ValueError("--layers and --sites go together")
        if self.points and self.layers:
            raise ValueError("give --points, or --layers with --sites, not both")
        if (self.points or self.layers) and not self.collect_activations:
            raise ValueError("--points, --layers and --sites need --collect-activations")
        if self.split != "test" and self.dataset != HUB_DATASET:
            raise ValueError(f"--split belongs to --dataset {HUB_DATASET}; a file is one split")
        return self


def parse_args(argv: Sequence[str] | None = None) -> Config:
    """The options as a `Config`; a bad one ends the program with argparse's message and status 2."""
    parser = _parser()
    given = {name: value for name, value in vars(parser.parse_args(argv)).items() if value is not None}
    name = f"gsm8k-{datetime.now(UTC):%Y%m%dT%H%M%SZ}"
    given.setdefault("session_id", name)
    given["results_dir"] = results_path(given.get("results_dir"), name)
    try:
        return Config(**given)
    except ValidationError as error:
        first = error.errors()[0]
        option = f"--{str(first['loc'][0]).replace('_', '-')}: " if first["loc"] else ""
        parser.error(option + first["msg"].removeprefix("Value error, "))


def in_ray_job() -> bool:
    """Whether this process is the entrypoint of `ray job submit`."""
    return "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ


def results_path(given: str | None, name: str) -> Path:
    """Where results go, absolute.

    A Ray job's working directory is a cached copy that is thrown away, so there a relative path is put under
    `$VITRINE_HOME/results`, by default `~/.vitrine/results`.

    Args:
        given: the option's value, if any.
        name: the run's name, for the default.
    """
    if in_ray_job():
        return home() / "results" / Path(given or name).expanduser()
    return (Path(given).expanduser() if given else Path("results") / name).absolute()


def _parser() -> argparse.ArgumentParser:
    """Defaults live in `Config` alone: an option that was not given is None here."""
    parser = argparse.ArgumentParser(prog="python -m evals.gsm8k", usage="%(prog)s [options]", allow_abbrev=False)

    def option(name: str, text: str, kind: type = str, choices: Sequence[str] | None = None) -> None:
        default = Config.model_fields[name[2:].replace("-", "_")].default
        shown = f" (default: {default})" if isinstance(default, str | int | float) and default != "" else ""
        parser.add_argument(name, help=text + shown, type=kind, choices=choices)

    option("--base-url", "the server's OpenAI root, ending in /v1")
    option("--model", "model id; without it the first of the server's list")
    option("--dataset", f"demo, a GSM8K .jsonl or .parquet file, or {HUB_DATASET}")
    option("--split", f"split of {HUB_DATASET}")
    option("--samples", "how many problems; without it all", int)
    option("--seed", "choose problems at random by this seed; without it the first ones", int)
    option("--mode", "with or without the calculator", choices=["no-tools", "with-tools", "both"])
    option("--parallel", "requests kept in flight", int)
    option("--max-tokens", "most new tokens of one answer", int)
    option("--max-turns", "most answers per problem with tools", int)
    option("--temperature", "0 is greedy", float)
    option("--timeout", "seconds for one attempt of one request", float)
    option("--retries", "further attempts on 429, 503, timeouts and broken connections", int)
    option("--points", "activation points to record, comma separated")
    option("--layers", "layers to record, comma separated, or all; with --sites")
    option("--sites", "sites of those layers, comma separated: input_layernorm.output,...")
    option("--session-id", "groups the recorded runs; without it gsm8k-<time>")
    option("--results-dir", "a directory without a run; without it ./results/gsm8k-<time>")
    option("--wait-healthy", "seconds to wait for the server's /health", float)
    parser.add_argument(
        "--collect-activations",
        action="store_true",
        help="record activations; without points or layers, those the model names or three layers' norms",
    )
    add_serving_options(parser)
    return parser
