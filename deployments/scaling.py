"""The option `autoscaling`: fields of Ray Serve's `AutoscalingConfig`, checked at once."""

from __future__ import annotations

import json
from typing import Annotated, Any

from pydantic import BeforeValidator, ValidationError

from deployments.errors import nearest

TARGET = 0.75  # sequences in a replica, as a part of `max_running`, above which Serve starts another


def checked(value: Any) -> Any:
    """The given fields as Serve reads them; from the command line they come as JSON.

    Raises:
        ValueError: Serve has no such field, or does not take its value; names all of them.
    """
    from ray.serve.config import AutoscalingConfig  # takes a second, and few need it

    if isinstance(value, str):
        value = json.loads(value)
    if not isinstance(value, dict):
        return value  # the option's type refuses it
    value = {name: field for name, field in value.items() if field is not None}
    fields = AutoscalingConfig.model_fields
    if unknown := [f"{name}{nearest(name, fields)}" for name in value if name not in fields]:
        raise ValueError(f"Serve's AutoscalingConfig has no field {'; '.join(unknown)}")
    try:
        config = AutoscalingConfig(**value)
    except ValidationError as error:
        wrong = [": ".join((*map(str, one["loc"]), one["msg"])) for one in error.errors()]
        raise ValueError("; ".join(wrong).replace("Value error, ", "").replace("Input should be", "must be")) from None
    return config.model_dump(mode="json", include=set(value))


Autoscaling = Annotated[dict[str, Any] | None, BeforeValidator(checked)]


def complete(given: dict[str, Any], max_running: int) -> dict[str, Any]:
    """The given fields with this project's defaults.

    Without `initial_replicas`, a model that may scale to zero starts with one replica: a model that cannot be loaded
    is then known at once, and so is what `/v1/models` shows of it.

    Args:
        given: Checked fields.
        max_running: The most sequences that a replica runs at once.
    """
    fewest = given.get("min_replicas", 1)
    defaults = {"target_ongoing_requests": TARGET * max_running, "initial_replicas": max(1, fewest)}
    if fewest == 0:
        defaults["policy"] = {"policy_function": f"{__name__}:while_needed"}
    return defaults | given


def while_needed(context: Any) -> tuple[float, dict[str, Any]]:
    """Serve's own policy, which alone would start a replica that fails again and again while no request waits for it.

    Serve does not ask a policy while requests wait and no replica runs: it starts one.
    """
    from ray.serve.autoscaling_policy import default_autoscaling_policy

    return (0, {}) if context.current_num_replicas == 0 else default_autoscaling_policy(context)
