"""The HTTP server: `serve run serve_app:app`, or `serve run serve_app:build_app name=value ...`."""

import deployments.installed  # noqa: F401 - before the packages that it asks for

# isort: split
import contextlib
import os
from pathlib import Path
from typing import Any

import click  # the library of `serve`'s commands
from pydantic import ValidationError
from ray._private.utils import read_ray_address  # the only way to find out whether `serve run` will start Ray
from ray.serve import Application
from ray.serve.config import HTTPOptions

from deployments.activations.facts import StoreError
from deployments.clusters import ON_HEAD
from deployments.errors import LoadError
from deployments.model_files.names import located
from deployments.options import DEMO, NO_MODEL, Options, mistakes
from deployments.serve_actors import GRPC, environment
from serve_app.backend.deploying import replicas
from serve_app.http.keys import Keys
from serve_app.ingress import Ingress
from serve_app.lifecycle import check_free, drain_on_sigterm

# Serve's proxies and controller are not actors of this application: they read these if Ray was started with them.
# Proxies then use gRPC to the ingress, and answer 503 instead of 500 when it ends; a replica that hangs is ended at
# once, instead of once its requests have ended; metrics are exported after 2 s instead of 10. `serve run serve_app:app`
# starts Ray, if none runs yet, after it has imported this module. Otherwise, set them before `ray start`, as
# `ops/Dockerfile` does.
RAY_ENVIRONMENT = GRPC | {
    "RAY_SERVE_PROXY_USE_GRPC": "1",
    "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1",
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "serve_app.http.proxy:middlewares",
    "RAY_metrics_report_interval_ms": "2000",
}
for _name, _value in RAY_ENVIRONMENT.items():
    os.environ.setdefault(_name, _value)


class UserMistake(click.ClickException):
    """An error that `serve run` prints as one line instead of a traceback."""

    exit_code = 2


def build_app(options: Options | dict[str, Any]) -> Application:
    """Compose the ingress and one model's replicas; both find the activation store by its directory.

    Args:
        options: The operator's options; those that `serve run` and `serve deploy` pass by name are checked here.

    Raises:
        ValueError: The options are wrong, with all mistakes; or the API keys are malformed.
        OSError: The file with the API keys cannot be read, or Ray's cluster does not answer.
        LoadError: By default, the replicas need more GPUs than the cluster has.
        StoreError: Another server uses the store, or the disk refuses it; only where Ray is to be started.
        UserMistake: In `serve run`, instead of these; also if the model is not on this machine, the only one of the
            cluster.
    """
    try:
        checked = options if isinstance(options, Options) else _checked(options)
        starting = _will_start_ray()
        if starting:
            _schedule_as_batch_work()
        if starting and checked.model != NO_MODEL:
            place = located(checked.model, checked.models_dir)
            if isinstance(place, str) and "/" not in place:
                local = ", ".join([DEMO, *sorted(path.name for path in Path(checked.models_dir).glob("*/"))])
                click.echo(f"no local model {place} (local: {local}); trying the hub", err=True)
        app = _composed(checked)
        if starting:
            http = HTTPOptions()  # those that `serve run` takes
            check_free(http.host or "127.0.0.1", http.port, checked)
        if _serve_run():
            drain_on_sigterm(checked.request_timeout_s)
        return app
    except (ValueError, OSError, LoadError, StoreError) as error:
        if click.get_current_context(silent=True):
            raise UserMistake(error.message if isinstance(error, LoadError) else str(error)) from None
        raise


def build_model(options: Options | dict[str, Any]) -> Application:
    """One model's replicas as an application of their own, for a file for `serve deploy`, without a route.

    Its name is the ingress's application's, `.models.` and the model's id with `--` for `/`. Replicas refuse another
    name, because the ingress finds models by it.

    Args:
        options: Those of the model and its replicas; those of HTTP and of the store's limits have no effect.

    Raises:
        ValueError: The options are wrong, with all mistakes; or an application cannot be named after the model.
        OSError: Ray's cluster does not answer.
        LoadError: By default, the replicas need more GPUs than the cluster has.
    """
    checked = options if isinstance(options, Options) else _checked(options)
    if checked.model == NO_MODEL or "--" in checked.served_name:
        raise ValueError("model, model_id: give a model whose id has no '--', which stands for '/' in names")
    return replicas(checked, named=True)


def _serve_run() -> click.Context | None:
    """The context of `serve run`, if this is it; `serve build` starts nothing."""
    context = click.get_current_context(silent=True)
    return context if context and context.info_name == "run" else None


def _will_start_ray() -> bool:
    """Whether this is `serve run` on a machine where Ray does not run yet."""
    context = _serve_run()
    return context is not None and not context.params.get("address") and read_ray_address() is None


def _schedule_as_batch_work() -> None:
    """Schedule this thread, and the processes of the Ray that it starts, as batch work, unless it has another policy.

    A model's threads wait for each other many times in a step. By default, each process that wakes up takes a processor
    from one of them at once, so that all wait. Batch work takes an idle processor, or the next that becomes free. With
    32 streams on two cores, this gave 5% more tokens per second.
    """
    if hasattr(os, "SCHED_BATCH"):
        with contextlib.suppress(OSError):  # not every container allows it
            if os.sched_getscheduler(0) == os.SCHED_OTHER:
                os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def _checked(given: dict[str, Any]) -> Options:
    try:
        return Options.model_validate(given)
    except ValidationError as error:
        wrong = "; ".join(f"{name}: {message}" for name, message in mistakes(error))
        raise ValueError(f"{wrong} (python -m deployments.options_table lists all options)") from None


def _composed(options: Options) -> Application:
    ingress = Ingress.options(  # type: ignore[attr-defined]
        ray_actor_options={"num_cpus": 0, "resources": ON_HEAD, **environment(options)},
        # The replicas' streams pass through it, and it waits for clients' jobs.
        graceful_shutdown_timeout_s=max(options.request_timeout_s, options.client_code_timeout_s) + 30,
        max_surge_percent=100,  # one that replaces it starts before it stops
    )
    keys = Keys.read(options.api_keys_file)
    models = [] if options.model == NO_MODEL else [replicas(options)]
    return ingress.bind(options, keys, *models)  # type: ignore[no-any-return]


def __getattr__(name: str) -> Application:
    """Build `app` for `serve run serve_app:app`; other processes that import this package need none."""
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return build_app(Options())
