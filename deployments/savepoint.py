"""A savepoint, as options and requests name it."""

from pydantic import BaseModel, ConfigDict, Field


class Savepoint(BaseModel):
    """A capture point of a model with a name chosen by the operator or the loader.

    Attributes:
        name: Its name in requests; without a dot, so that it hides no point of the model.
        selector: The point as `capture.points` names it, or a module for its output.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    name: str = Field(pattern=r"^[A-Za-z][A-Za-z0-9_-]{0,63}$")
    selector: str = Field(min_length=1, max_length=256)
