"""The configuration of one evaluation, checked and frozen."""

import json
import os
from collections.abc import Collection
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args
from urllib.parse import urlsplit

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator, model_validator

from deployments.options import NO_MODEL, Options, mistakes
from evals.scoring import Rule

Mode = Literal["no-tools", "with-tools"]
Stage = Literal["deploy", "generate", "report"]
STAGES: tuple[Stage, ...] = get_args(Stage)
HUB_DATASET = "openai/gsm8k"
CONTROL = "control"
VARIANTS = Path(__file__).with_name("variants.yaml")
LARGEST = 1 << 31  # of what is counted
MOST_NAMED = 5  # in a message
# Fields of a request that the evaluator sets.
OF_EACH_REQUEST = {"model", "messages", "max_tokens", "temperature", "seed", "stream", "tools", "n", "capture"}
OF_EACH_RUN = {"sample_id", "tags", "store_text", "return", "mode"}  # fields of `capture` that the evaluator sets
# Strict: in a file, `samples: true` is a mistake and not 1.
Switch = Annotated[bool, Field(strict=True)]
Whole = Annotated[int, Field(strict=True)]
Count = Annotated[int, Field(strict=True, ge=1, le=LARGEST)]
Natural = Annotated[int, Field(strict=True, ge=0, le=LARGEST)]
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]  # parts of file names, which a dot separates


class EvalError(Exception):
    """What stops an evaluation; the text is for the user."""


def some(names: Collection[str]) -> str:
    """The first of some names, for a message."""
    return ", ".join([*islice(names, MOST_NAMED), *(["..."] if len(names) > MOST_NAMED else [])]) or "none"


def in_ray_job() -> bool:
    """Whether this process is the entrypoint of `ray job submit`."""
    return "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ


def scaled_field(intervention: dict[str, Any]) -> str | None:
    """The field of an intervention that a sweep's scale sets; None where it has no strength."""
    return None if "sae" in intervention else {"add": "scale", "scale": "factor"}.get(str(intervention.get("op")))


class Config(BaseModel):
    """The options of an evaluation, under `config` in config.json.

    Attributes:
        base_url: OpenAI root of the server, ending in /v1; with --serve, port 0 chooses a free one
        model: id of the served model (default: the server's first)
        dataset: demo, a GSM8K .jsonl or .parquet file, or openai/gsm8k
        samples: number of problems (default: all)
        seed: seed for choosing problems and sampling tokens (default: the first problems)
        epochs: completions of each problem in each evaluation condition
        mode: with or without the calculator
        variants: prompt variants, comma-separated, or a YAML file of texts by name (default: control)
        few_shot: worked examples before each question: their number, or a file of them
        system: system prompt
        parallel: maximum requests at the same time
        max_tokens: maximum tokens of one completion
        temperature: 0 is greedy (default: the model's own, else 0)
        extra_body: further fields of each request
        interventions: YAML or JSON file of interventions; each prompt variant runs without and with them
        sweep: scales and layers of the interventions, such as scale=-4,0,4 layer=8,12
        timeout: seconds for one attempt of a request
        max_outage: seconds to wait for a server that is offline
        rule: scoring rule
        rewards: weights of the rewards, by name
        collect_activations: record activations, by default at the points that the server chooses
        capture: JSON of the request field capture, such as {"points": ["layers.8.output"]}
        transfer_activations: copy the recorded activations to the results directory
        inline_activations: values of each recorded point in each sample's record
        session_id: session of the stored runs
        results_dir: directory of the results (default: ./results/gsm8k-<time>)
        resume: continue the evaluation in --results-dir: repeat missing, failed and unstored samples
        serve: serve this model at the base URL for the evaluation
        server_options: options of the server that `serve` starts
        keep_running: leave the server of --serve running
        stages: stages to run, from deploy,generate,report (default: all)
    """

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    base_url: str = "http://127.0.0.1:8000/v1"
    model: str = ""
    dataset: str = "demo"
    samples: Count | None = None
    seed: Whole | None = None
    epochs: Count = 1
    mode: Mode | Literal["both"] = "both"
    variants: dict[Name, str] = Field({CONTROL: ""}, min_length=1)
    few_shot: Natural | Annotated[str, Field(min_length=1)] = 0
    system: str = ""
    parallel: Count = 16
    max_tokens: Count = 512
    temperature: Annotated[Number, Field(ge=0.0)] | None = None  # None until it begins: the model's own
    extra_body: dict[str, Any] = {}
    interventions: tuple[dict[str, Any], ...] = ()
    sweep: dict[Literal["layer", "scale"], tuple[Annotated[Number, Field(ge=-LARGEST, le=LARGEST)], ...]] = {}
    timeout: Annotated[Number, Field(gt=0.0)] = 300.0
    max_outage: Annotated[Number, Field(ge=0.0)] = 600.0
    rule: Rule = "normalized"
    rewards: dict[str, Number] = {"correctness": 1.0}
    collect_activations: Switch = False
    capture: dict[str, Any] = {}
    transfer_activations: Switch = False
    inline_activations: Natural = 0
    session_id: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}$")]
    results_dir: Path
    resume: Switch = False
    serve: str = ""
    server_options: dict[str, Any] = {}
    keep_running: Switch = False
    stages: tuple[Stage, ...] = STAGES

    @property
    def served(self) -> Options:
        """The options of the server that `serve` asks for."""
        return Options.model_validate({"model": self.serve, **self.server_options})

    @property
    def plain_at_zero(self) -> bool:
        """Whether a scale of 0 is no steering, and not asked: where all interventions add, and so do nothing then."""
        return all(scaled_field(intervention) == "scale" for intervention in self.interventions)

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

    @field_validator("variants", mode="before")
    @classmethod
    def _read_variants(cls, value: object) -> object:
        """Names of the variants that ship, or a YAML file whose variants are all asked; or the texts by name."""
        if isinstance(value, str):
            if value.endswith((".yaml", ".yml")):
                return _read_yaml(value)
            value = [part.strip() for part in value.split(",")]
        if not isinstance(value, list | tuple):
            return value
        texts = yaml.safe_load(VARIANTS.read_text(encoding="utf-8"))
        if unknown := [str(name) for name in value if not isinstance(name, str) or name not in texts]:
            raise ValueError(f"there is no {', '.join(unknown)}, only {', '.join(texts)}; a file.yaml may have others")
        if len(set(value)) < len(value):
            raise ValueError(f"a name appears twice in {','.join(value)}")
        return {name: texts[name] for name in value}

    @field_validator("variants")
    @classmethod
    def _check_control(cls, texts: dict[str, str]) -> dict[str, str]:
        if texts.get(CONTROL):
            raise ValueError(f"{CONTROL} has a text; it must be empty")
        return {name: text.strip() for name, text in texts.items()}

    @field_validator("few_shot", mode="before")
    @classmethod
    def _read_number(cls, value: object) -> object:
        return int(value) if isinstance(value, str) and value.lstrip("-").isdecimal() else value

    @field_validator("capture", "extra_body", mode="before")
    @classmethod
    def _read_json(cls, value: object) -> object:
        if not isinstance(value, str):
            return value
        try:
            return json.loads(value)
        except ValueError as error:
            raise ValueError(f"not a JSON object: {error}") from None

    @field_validator("capture", "extra_body")
    @classmethod
    def _leaves_the_evaluators_fields(cls, value: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        if taken := (OF_EACH_RUN if info.field_name == "capture" else OF_EACH_REQUEST) & value.keys():
            raise ValueError(f"{', '.join(sorted(taken))}: the evaluator sets this itself")
        return value

    @field_validator("interventions", mode="before")
    @classmethod
    def _read_interventions(cls, value: object) -> object:
        """The list itself, or the YAML or JSON file that has it."""
        if not isinstance(value, str):
            return value
        interventions = _read_yaml(value)
        if not isinstance(interventions, list) or not interventions:
            raise ValueError(f"{value}: not a list of interventions")
        return interventions

    @field_validator("sweep", mode="before")
    @classmethod
    def _split_sweep(cls, value: object) -> object:
        """`scale=-4,0,4 layer=8,12`, as one text or its words."""
        words = value.split() if isinstance(value, str) else value
        if not isinstance(words, list | tuple):
            return value
        try:
            pairs = [str(word).split("=") for word in words]
            return {name: [float(number) + 0.0 for number in numbers.split(",")] for name, numbers in pairs}  # no -0.0
        except ValueError:
            raise ValueError("write it as scale=-4,0,4 layer=8,12") from None

    @field_validator("sweep")
    @classmethod
    def _check_sweep(cls, sweep: dict[str, tuple[float, ...]]) -> dict[str, tuple[float, ...]]:
        if repeated := [name for name, numbers in sweep.items() if len(set(numbers)) < len(numbers)]:
            raise ValueError(f"a {repeated[0]} appears twice")
        if broken := [number for number in sweep.get("layer", ()) if not number.is_integer()]:
            raise ValueError(f"a layer is a whole number, not {broken[0]:g}")
        return sweep

    @field_validator("server_options", mode="before")
    @classmethod
    def _split_pairs(cls, value: object) -> object:
        """`["name=value", ...]`, as the command line gives them."""
        if not isinstance(value, list):
            return value
        pairs = [str(pair).partition("=") for pair in value]
        if wrong := [name for name, equals, _ in pairs if not equals]:
            raise ValueError(f"{wrong[0]!r} must be written as name=value")
        return {name: text for name, _, text in pairs}

    @field_validator("stages", mode="before")
    @classmethod
    def _in_order(cls, value: object) -> object:
        return in_order(value)

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if (self.capture or self.transfer_activations or self.inline_activations) and not self.collect_activations:
            raise ValueError("--capture, --transfer-activations and --inline-activations need --collect-activations")
        if self.sweep and not self.interventions:
            raise ValueError("--sweep needs --interventions")
        if ("{layer}" in str(self.interventions)) != ("layer" in self.sweep):
            raise ValueError("--sweep layer=... and {layer} in a point of --interventions go together")
        if "scale" in self.sweep and not any(map(scaled_field, self.interventions)):
            raise ValueError(
                "--sweep scale=...: no intervention of --interventions has a scale; add and scale have one"
            )
        if self.sweep.get("scale") == (0,) and self.plain_at_zero:
            raise ValueError("--sweep: a scale of 0 changes nothing: name another one beside it")
        return self

    @model_validator(mode="after")
    def _check_serving(self) -> Self:
        if not self.serve:
            for name, given in {"server-option": self.server_options, "keep-running": self.keep_running}.items():
                if given:
                    raise ValueError(f"--{name} needs --serve")
            return self
        if self.serve == NO_MODEL or "model" in self.server_options:
            raise ValueError("--serve names the model that is served: leave --model out")
        if self.stages == ("deploy",) and not self.keep_running:
            raise ValueError("--stages deploy needs --keep-running: otherwise the server would be stopped at once")
        try:
            self.served  # noqa: B018 - its options are checked when it is made
        except ValidationError as error:
            wrong = "; ".join(f"{name}: {message}" for name, message in mistakes(error))
            raise ValueError(f"--server-option {wrong}") from None
        except RuntimeError as error:  # `~name` of nobody
            raise ValueError(f"--server-option: {error}") from None
        return self


def in_order(value: object) -> tuple[Stage, ...]:
    """Some stages, named with commas between them or as a list, in the order in which they run.

    Raises:
        ValueError: One is none, or none is named.
    """
    if isinstance(value, str):
        value = [part.strip() for part in value.split(",")]
    if not isinstance(value, list | tuple) or not value:
        raise ValueError(f"--stages: choose from {','.join(STAGES)}")
    if unknown := [str(stage) for stage in value if stage not in STAGES]:
        raise ValueError(f"--stages: {unknown[0]!r} is not a stage; the stages are {','.join(STAGES)}")
    return tuple(stage for stage in STAGES if stage in value)


def _read_yaml(path: str) -> Any:
    try:
        return yaml.safe_load(Path(path).expanduser().read_text(encoding="utf-8"))
    except (OSError, ValueError, RuntimeError, yaml.YAMLError) as error:
        raise ValueError(f"{path}: {error}") from None
