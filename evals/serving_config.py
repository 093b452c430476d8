"""The options of deploying and of stages, a part of `Config`."""

from typing import Annotated, Any, Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from deployments.options import NO_MODEL, Options, mistakes

Stage = Literal["deploy", "configure", "generate", "report"]
STAGES: tuple[Stage, ...] = get_args(Stage)
# What no later call on the same results takes over.
OF_ONE_CALL = frozenset({"fresh", "keep_running", "stages", "smoke"})
Switch = Annotated[bool, Field(strict=True)]  # in a file, `fresh: "no"` is a mistake


class ServingConfig(BaseModel):
    """Which server a run brings with it, and which of its stages are run."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    serve: str = ""  # a model; without it the server is somebody else's business
    server_options: dict[str, Any] = {}  # of `deployments/options.py`
    fresh: Switch = False
    keep_running: Switch = False
    stages: tuple[Stage, ...] = STAGES
    smoke: Switch = False

    @property
    def served(self) -> Options:
        """The options of the server that `serve` asks for."""
        return Options.model_validate({"model": self.serve, **self.server_options})

    @field_validator("server_options", mode="before")
    @classmethod
    def _from_pairs(cls, value: object) -> object:
        """`["name=value", ...]`, as the command line gives them."""
        if not isinstance(value, list):
            return value
        pairs = [str(pair).partition("=") for pair in value]
        for name, equals, _ in pairs:
            if not equals:
                raise ValueError(f"{name!r} must be written as name=value")
        return {name: text for name, _, text in pairs}

    @field_validator("stages", mode="before")
    @classmethod
    def _in_order(cls, value: object) -> object:
        return in_order(value)

    @model_validator(mode="after")
    def _check_serving(self) -> Self:
        if not self.serve:
            for name, given in {
                "server-option": self.server_options,
                "fresh": self.fresh,
                "keep-running": self.keep_running,
            }.items():
                if given:
                    raise ValueError(f"--{name} needs --serve")
            return self
        if self.serve == NO_MODEL or "model" in self.server_options:
            raise ValueError("--serve names the model that is served: leave --model out")
        if self.stages == ("deploy",) and not self.keep_running:
            raise ValueError(
                "--stages deploy needs --keep-running: otherwise the server would be stopped again at once",
            )
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
