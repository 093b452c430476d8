"""What one evaluation run is told, checked and frozen."""

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, field_validator, model_validator

from evals.serving_config import ServingConfig

Mode = Literal["no-tools", "with-tools"]
HUB_DATASET = "openai/gsm8k"
CONTROL = "control"
# Parts of file names, which a dot sets apart.
NAME = r"^[A-Za-z0-9_-]{1,64}$"


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
    variants: tuple[Annotated[str, Field(pattern=NAME)], ...] = Field((CONTROL,), min_length=1)
    variants_file: Path | None = None
    few_shot: int = Field(0, ge=0)
    few_shot_file: Path | None = None
    parallel: int = Field(16, ge=1)
    max_tokens: int = Field(512, ge=1)  # per turn
    max_turns: int = Field(12, ge=1)
    temperature: float = Field(0.0, ge=0.0, allow_inf_nan=False)
    timeout: float = Field(300.0, gt=0.0, allow_inf_nan=False)  # seconds, one attempt of one request
    retries: int = Field(8, ge=0)
    rewards: dict[str, Annotated[float, Field(allow_inf_nan=False)]] = {"correctness": 1.0}  # weights
    collect_activations: bool = False
    points: tuple[str, ...] = ()
    layers: tuple[int, ...] | Literal["all"] = ()
    sites: tuple[str, ...] = ()
    tokens: str = Field("all", pattern=r"^(all|prompt|generated|last|last:[1-9][0-9]*)$")
    transfer_activations: bool = False
    inline_activations: int = Field(0, ge=0)  # values a point
    session_id: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}$")]
    results_dir: Path
    resume: bool = False
    wait_healthy: float = Field(0.0, ge=0.0, allow_inf_nan=False)  # seconds

    @property
    def modes(self) -> tuple[Mode, ...]:
        """The modes to run, in order."""
        return ("no-tools", "with-tools") if self.mode == "both" else (self.mode,)

    @field_validator("base_url")
    @classmethod
    def _without_slash(cls, value: str) -> str:
        return value.rstrip("/")

    @field_validator("points", "sites", "variants", mode="before")
    @classmethod
    def _split_names(cls, value: object) -> object:
        return tuple(part.strip() for part in value.split(",")) if isinstance(value, str) else value

    @field_validator("layers", mode="before")
    @classmethod
    def _split_layers(cls, value: object) -> object:
        return value.split(",") if isinstance(value, str) and value != "all" else value

    @field_validator("rewards", mode="before")
    @classmethod
    def _split_weights(cls, value: object) -> object:
        if not isinstance(value, str):
            return value
        pairs = [part.strip().partition("=") for part in value.split(",")]
        if wrong := [name for name, _, weight in pairs if not weight]:
            raise ValueError(f"{wrong[0]!r} has no weight: write {wrong[0]}=1")
        return {name: weight for name, _, weight in pairs}

    @field_validator("variants", "points", "sites")
    @classmethod
    def _refuse_repeats(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(names)) < len(names):
            raise ValueError(f"a name comes twice in {','.join(names)}")
        return names

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if bool(self.layers) != bool(self.sites):
            raise ValueError("--layers and --sites go together")
        if self.points and self.layers:
            raise ValueError("give --points, or --layers with --sites, not both")
        if self._says_what_to_record() and not self.collect_activations:
            raise ValueError(
                "--points, --layers, --sites, --tokens, --transfer-activations and --inline-activations need "
                "--collect-activations"
            )
        if self.split != "test" and self.dataset != HUB_DATASET:
            raise ValueError(f"--split belongs to --dataset {HUB_DATASET}; a file is one split")
        if self.few_shot_file and not self.few_shot:
            raise ValueError("--few-shot-file needs --few-shot, the number of its examples to show")
        return self

    def _says_what_to_record(self) -> bool:
        chosen: list[Any] = [self.points, self.layers, self.tokens != "all"]
        return any([*chosen, self.transfer_activations, self.inline_activations])
