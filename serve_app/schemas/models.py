"""The bodies of `/models/load` and `/models/unload`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]
from pydantic import Field, field_validator

from deployments.options import Attention, Dtype
from deployments.savepoint import Savepoint
from serve_app.schemas.base import WireModel

GpuOrCpu = Annotated[str, Field(pattern=r"^(cpu|cuda(:[0-9]{1,3})?)$")]
DeviceMap = (
    Literal["auto", "balanced", "balanced_low_0", "sequential"]
    | GpuOrCpu
    | Annotated[
        dict[Annotated[str, Field(max_length=256)], Annotated[int, Field(ge=0, le=999)] | GpuOrCpu],
        Field(min_length=1, max_length=4096, fail_fast=True),
    ]
)


class LoadRequest(WireModel):
    """`POST /models/load`.

    `model_id` names a repository or a model of the operator, never a path.
    """

    model_id: str = Field(min_length=1, max_length=128)
    revision: str | None = Field(default=None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]{0,127}$")
    dtype: Dtype = "auto"
    attention: Attention = "auto"
    device_map: DeviceMap | None = None
    trust_remote_code: bool = False
    max_seq_len: int | None = Field(default=None, ge=2, le=2**31 - 1)
    num_replicas: int = Field(default=1, ge=1, le=128)
    savepoints: list[Savepoint] = Field(default_factory=list, max_length=256, fail_fast=True)

    @field_validator("model_id")
    @classmethod
    def _names_a_repository(cls, value: str) -> str:
        try:
            validate_repo_id(value)
        except HFValidationError as error:
            raise ValueError(str(error)) from error
        return value

    @field_validator("revision")
    @classmethod
    def _stays_in_its_repository(cls, value: str | None) -> str | None:
        if value is not None and ".." in value:
            raise ValueError("the name of a branch, tag or commit cannot contain '..'")
        return value

    @property
    def settings(self) -> dict[str, Any]:
        """The options that it sets; the others keep their defaults, or the values of the loaded model."""
        return self.model_dump(mode="json", exclude={"model_id"}, exclude_unset=True)


class UnloadRequest(WireModel):
    """`POST /models/unload`."""

    model_id: str = Field(min_length=1, max_length=256)
