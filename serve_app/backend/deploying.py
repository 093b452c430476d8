"""Deployment of this project's actors: their settings in Serve, and a model's replicas."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from typing import Any

import click
import ray
from ray._private.resource_and_label_spec import ResourceAndLabelSpec
from ray._private.services import canonicalize_bootstrap_address
from ray.serve import Application

from deployments.errors import LoadError
from deployments.options import Options
from deployments.replica.replica import ModelReplica
from deployments.scaling import complete
from deployments.serve_actors import environment

RELEASE_S = 3.0  # until Ray counts the GPU of a replica that has just ended as free


def replicas(options: Options, named: bool = False, **deployment: Any) -> Application:
    """One model's replicas, which stop after their last request has ended.

    Args:
        options: The model's options.
        named: Whether they are an application of their own, which must be named after the model.
        deployment: Further options of the Serve deployment.

    Raises:
        LoadError: By default, the replicas need more GPUs than the cluster has.
    """
    options = with_gpus(options)
    actor = {"num_cpus": options.num_cpus, "num_gpus": options.num_gpus, **environment(options)}
    if options.autoscaling is None:
        deployment["num_replicas"] = options.num_replicas
    else:
        deployment["autoscaling_config"] = complete(options.autoscaling, options.max_running)
    replica = ModelReplica.options(  # type: ignore[attr-defined]
        ray_actor_options=actor,
        graceful_shutdown_timeout_s=options.request_timeout_s,
        max_surge_percent=options.max_surge_percent,
        **deployment,
    )
    return replica.bind(options, named=named)  # type: ignore[no-any-return]


def loaded(options: Options) -> Application:
    """A model that is loaded and unloaded at run time: an application of its own, without a route.

    Serve stops deploying it at the first replica that fails, unless one has started; the loader handles that case.

    Raises:
        LoadError: By default, the replicas need more GPUs than are free. With a number for `num_gpus` they wait, since
            Ray's autoscaler may add a node.
    """
    resolved, end = with_gpus(options), time.monotonic() + RELEASE_S
    needed = _first(resolved) * (resolved.num_gpus or 0)
    while options.num_gpus is None and (free := _gpus(ray.available_resources)) < needed:
        if time.monotonic() > end:
            raise _too_few_gpus(needed, _cluster_gpus(), free)
        time.sleep(RELEASE_S / 10)
    return replicas(resolved, named=True, max_constructor_retry_count=1)


def with_gpus(options: Options) -> Options:
    """The options with a number for `num_gpus`: by default 1 where the cluster has a GPU, else 0.

    Raises:
        LoadError: By default, the replicas need more GPUs than the cluster has.
    """
    if options.num_gpus is not None:
        return options
    gpus = 0 if options.on_cpu else _cluster_gpus()
    if 0 < gpus < _first(options):
        raise _too_few_gpus(_first(options), gpus, gpus)
    return options.model_copy(update={"num_gpus": min(1, gpus)})


def _first(options: Options) -> int:
    """The replicas that start at once."""
    if options.autoscaling is None:
        return options.num_replicas
    return int(complete(options.autoscaling, options.max_running)["initial_replicas"])


def _too_few_gpus(needed: float, gpus: float, free: float) -> LoadError:
    message = (
        f"GPUs needed: {needed:g}, one for each replica; in the cluster: {gpus:g}; free: {free:g}. Unload a model, "
        "lower num_replicas, or start the server with num_gpus=0.5: two replicas then share a GPU. num_gpus=1 "
        "waits until Ray adds a node, and num_gpus=0 serves on the CPU"
    )
    return LoadError(message, None, "no_free_gpu", 409)


def _cluster_gpus() -> float:
    """The GPUs of Ray's cluster; `serve run` joins or starts it only after it has built the application."""
    if ray.is_initialized():
        return _gpus(ray.cluster_resources)
    context = click.get_current_context(silent=True)
    address: Any = context and context.params.get("address")
    address = address or os.environ.get("RAY_ADDRESS")
    if "://" not in (address or "") and canonicalize_bootstrap_address(address) is None:
        # Ray will start here, with what it then detects.
        return ResourceAndLabelSpec().resolve(is_head=True).num_gpus or 0
    with ray.init(address, log_to_driver=False, logging_level=logging.ERROR):
        return _gpus(ray.cluster_resources)


def _gpus(resources: Callable[[], Any]) -> float:
    return float(resources().get("GPU", 0))
