"""The configuration of one evaluation run, checked and frozen."""

import json
from collections.abc import Collection
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

import yaml
from pydantic import AfterValidator, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from deployments.points.token_choices import parse
from deployments.readouts.spec import MOST_READOUTS, ReadoutName
from evals.scoring import Rule
from evals.serving_config import ServingConfig, Switch

Mode = Literal["no-tools", "with-tools"]
HUB_DATASET = "openai/gsm8k"
CONTROL = "control"
# Parts of file names, which a dot sets apart.
NAME = r"^[A-Za-z0-9_-]{1,64}$"
LARGEST = 1 << 31  # of what is counted
MOST_NAMED = 5  # in a message
# Strict: in a file, `samples: true` is a mistake and not 1.
Whole = Annotated[int, Field(strict=True)]
Count = Annotated[int, Field(strict=True, ge=1, le=LARGEST)]
Natural = Annotated[int, Field(strict=True, ge=0, le=LARGEST)]
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]


class EvalError(Exception):
    """What stops a run; the text is for the user."""


def some(names: Collection[str]) -> str:
    """The first of some names, for a message."""
    return ", ".join([*islice(names, MOST_NAMED), *(["..."] if len(names) > MOST_NAMED else [])]) or "none"


def scaled_field(intervention: dict[str, Any]) -> str | None:
    """What a sweep's scale sets in an intervention; None where that has no strength."""
    return None if "sae" in intervention else {"add": "scale", "scale": "factor"}.get(str(intervention.get("op")))


def _names_tokens(value: str) -> str:
    parse(value)
    return value


# The context in which options of results are validated: earlier versions took some that are refused now.
STORED = "stored"


class Config(ServingConfig):
    """The configuration of a run. `model`, `results_dir` and `session_id` are never empty once it starts."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    base_url: str = "http://127.0.0.1:8000/v1"
    model: str = ""
    dataset: str = "demo"
    split: str = "test"
    samples: Count | None = None
    seed: Whole | None = None
    sampling_seed: Whole | None = None  # without it `seed`
    epochs: Count = 1
    mode: Mode | Literal["both"] = "both"
    variants: tuple[Annotated[str, Field(pattern=NAME)], ...] = Field((CONTROL,), min_length=1)
    variants_file: Path | None = None
    few_shot: Natural = 0
    few_shot_file: Path | None = None
    parallel: Count = 16
    workers: Count = 1  # Ray workers that share them equally
    max_tokens: Count = 512  # per turn
    max_turns: Count = 12
    interventions: tuple[dict[str, Any], ...] = ()
    steer: tuple[str, ...] = ()  # variants; all without it
    sweep: dict[Literal["layer", "scale"], tuple[Annotated[Number, Field(ge=-LARGEST, le=LARGEST)], ...]] = {}
    readouts: tuple[ReadoutName, ...] = Field((), max_length=MOST_READOUTS)
    tools: Literal["native", "text"] = "native"
    max_failures: Natural | None = None
    temperature: Annotated[Number, Field(ge=0.0)] | None = None  # None until the run begins: the model's own
    top_p: Annotated[Number, Field(gt=0.0, le=1.0)] | None = None
    top_k: Natural | None = None
    system: str = ""
    chat_template_kwargs: dict[str, Any] = {}
    timeout: Annotated[Number, Field(gt=0.0)] = 300.0  # seconds, one attempt of one request
    retries: Natural = 8
    max_outage: Annotated[Number, Field(ge=0.0)] = 600.0  # seconds that a server that is away is waited for
    rule: Rule = "normalized"
    rewards: dict[str, Number] = {"correctness": 1.0}  # weights
    collect_activations: Switch = False
    points: tuple[str, ...] = ()
    layers: tuple[Whole, ...] | Literal["all"] = ()
    sites: tuple[str, ...] = ()
    tokens: Annotated[str, AfterValidator(_names_tokens)] = "all"
    transfer_activations: Switch = False
    inline_activations: Natural = 0  # values a point
    session_id: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}$")]
    results_dir: Path
    resume: Switch = False
    wait_healthy: Annotated[Number, Field(ge=0.0)] = 0.0  # seconds

    @property
    def steered(self) -> tuple[str, ...]:
        """The variants that are also asked with the interventions."""
        return (self.steer or self.variants) if self.interventions else ()

    @property
    def plain_at_zero(self) -> bool:
        """Whether a scale of 0 is no steering, and not asked: where all interventions add, and so do nothing then."""
        return all(scaled_field(one) == "scale" for one in self.interventions)

    @property
    def modes(self) -> tuple[Mode, ...]:
        """The modes to run, in order."""
        return ("no-tools", "with-tools") if self.mode == "both" else (self.mode,)

    @field_validator("base_url")
    @classmethod
    def _is_an_address(cls, value: str) -> str:
        try:
            url = urlsplit(value)
            is_one = url.scheme in ("http", "https") and url.hostname and url.port != -1  # reading a wrong port raises
        except ValueError:
            is_one = False
        if "@" in value or (is_one and (url.query or url.fragment)):  # results would show what stands there
            raise ValueError("must not hold a user, a password or a query: give a key by OPENAI_API_KEY")
        if not is_one or value.split() != [value]:
            raise ValueError("must be an address like http://127.0.0.1:8000/v1")
        return value.rstrip("/")

    @field_validator("points", "sites", "variants", "steer", "readouts", mode="before")
    @classmethod
    def _split_names(cls, value: object) -> object:
        return tuple(part.strip() for part in value.split(",")) if isinstance(value, str) else value

    @field_validator("layers", mode="before")
    @classmethod
    def _split_layers(cls, value: object) -> object:
        if not isinstance(value, str) or value == "all":
            return value
        try:
            return [int(part) for part in value.split(",")]
        except ValueError:
            raise ValueError("give all, or numbers separated by commas") from None

    @field_validator("chat_template_kwargs", mode="before")
    @classmethod
    def _read_json(cls, value: object) -> object:
        if not isinstance(value, str):
            return value
        try:
            return json.loads(value)
        except ValueError as error:
            raise ValueError(f"not a JSON object: {error}") from None

    @field_validator("interventions", mode="before")
    @classmethod
    def _read_interventions(cls, value: object) -> object:
        """The list itself, or the YAML or JSON file that has it."""
        if not isinstance(value, str):
            return value
        try:
            found = yaml.safe_load(Path(value).expanduser().read_text(encoding="utf-8"))
        except (OSError, ValueError, RuntimeError, yaml.YAMLError) as error:
            raise ValueError(f"{value}: {error}") from None
        if not isinstance(found, list) or not found:
            raise ValueError(f"{value}: not a list of interventions")
        return found

    @field_validator("sweep", mode="before")
    @classmethod
    def _split_sweep(cls, value: object) -> object:
        """`scale=-4,0,4 layer=8,12`, as one text or its words."""
        words = value.split() if isinstance(value, str) else value
        if not isinstance(words, list | tuple):
            return value
        try:
            pairs = [str(word).split("=") for word in words]
            found = {name: [float(number) + 0.0 for number in numbers.split(",")] for name, numbers in pairs}  # no -0.0
        except ValueError:
            raise ValueError("write it as scale=-4,0,4 layer=8,12") from None
        if repeated := [name for name, numbers in found.items() if len(set(numbers)) < len(numbers)]:
            raise ValueError(f"a {repeated[0]} appears twice")
        if broken := [number for number in found.get("layer", ()) if not number.is_integer()]:
            raise ValueError(f"a layer is a whole number, not {broken[0]:g}")
        return found

    @field_validator("rewards", mode="before")
    @classmethod
    def _split_weights(cls, value: object) -> object:
        if not isinstance(value, str):
            return value
        pairs = [part.strip().partition("=") for part in value.split(",")]
        if wrong := [name for name, _, weight in pairs if not weight]:
            raise ValueError(f"{wrong[0]!r} has no weight: write {wrong[0]}=1")
        try:
            return {name: float(weight) for name, _, weight in pairs}
        except ValueError as error:
            raise ValueError(f"a weight is a number: {error}") from None

    @field_validator("variants", "steer", "points", "sites", "readouts")
    @classmethod
    def _refuse_repeats(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(names)) < len(names):
            raise ValueError(f"a name appears twice in {','.join(names)}")
        return names

    @model_validator(mode="after")
    def _check_together(self, info: ValidationInfo) -> Self:
        if bool(self.layers) != bool(self.sites):
            raise ValueError("--layers and --sites go together")
        if self.points and self.layers:
            raise ValueError("give --points, or --layers with --sites, not both")
        if self._says_what_to_record() and not self.collect_activations:
            raise ValueError(
                "--points, --layers, --sites, --tokens, --transfer-activations and --inline-activations need "
                "--collect-activations"
            )
        if self.sweep.get("scale") == (0,) and self.plain_at_zero:
            raise ValueError("--sweep: a scale of 0 changes nothing: name another one beside it")
        if (self.sweep or self.steer) and not self.interventions:
            raise ValueError("--sweep and --steer need --interventions")
        if unknown := [name for name in self.steer if name not in self.variants]:
            raise ValueError(f"--steer {unknown[0]}: not among --variants {','.join(self.variants)}")
        swept = "{layer}" in str(self.interventions)
        if swept != ("layer" in self.sweep):
            raise ValueError("--sweep layer=... and {layer} in a point of --interventions go together")
        if self.split != "test" and self.dataset != HUB_DATASET:
            raise ValueError(f"--split belongs to --dataset {HUB_DATASET}; a file has one split only")
        if self.few_shot_file and not self.few_shot:
            raise ValueError("--few-shot-file needs --few-shot, the number of examples to show")
        if info.context == STORED:
            return self
        if "scale" in self.sweep and not any(map(scaled_field, self.interventions)):
            raise ValueError(
                "--sweep scale=...: no intervention of --interventions has a scale; add and scale have one"
            )
        if self.parallel % self.workers:
            raise ValueError(f"--parallel {self.parallel} must be a multiple of --workers {self.workers}")
        return self

    def _says_what_to_record(self) -> bool:
        chosen: list[Any] = [self.points, self.layers, self.tokens != "all"]
        return any([*chosen, self.transfer_activations, self.inline_activations])
