"""The record that repeats an evaluation, config.json, and what must not change while it goes on."""

import hashlib
import os
import platform
import subprocess
from collections.abc import Set
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from deployments import __version__
from evals.config import Config
from evals.server.server_queries import ask_json, is_closed
from evals.task.prompts import Prompts

PACKAGES = ("ray", "pyarrow", "httpx", "pydantic", "torch", "transformers", "nnsight", "numpy")
# Options on which no answer depends; what files hold is compared for itself, and answers are scored and rewarded anew.
MAY_DIFFER = {"base_url", "parallel", "max_outage", "results_dir", "dataset", "few_shot", "resume"}
MAY_DIFFER |= {"transfer_activations", "rule", "rewards", "serve", "keep_running", "stages"}
# What must be the same besides the options.
FACTS: tuple[tuple[str, ...], ...] = (("prompts",), ("dataset", "sha256"), ("versions", "vitrine"))
FACTS += (("model", "revision"), ("model", "adapter_revision"))
ROOT = Path(__file__).parents[2]
GIT_S = 10.0  # that git may take: the checkout may lie on a slow disk
Facts = dict[str, Any]


def facts(config: Config, prompts: Prompts, path: Path, problems: int) -> Facts:
    """The contents of config.json, written before the first request; null what another server does not report.

    Args:
        config: the options, with the model's name.
        prompts: all texts.
        path: of the dataset.
        problems: how many are asked.

    Returns:
        config: All options with their values.
        versions: The evaluator's versions of Python and packages.
        git: The evaluator's `commit`, and whether files were changed since (`dirty`).
        server: `options` of the server, without keys, and `versions` of its packages.
        model: The model's entry in `/v1/models`. `revision` is a commit, or `sha256:` and a digest of the directory.
        prompts: All texts of the prompts, with the worked examples in their order.
        dataset: `path`, `sha256` and the number of `problems`.
        host: The evaluator's machine.
    """
    model = entry(config)
    return {
        "config": config.model_dump(mode="json", exclude={"resume"}),
        "versions": {"python": platform.python_version(), "vitrine": __version__}
        | {name: _version(name) for name in PACKAGES},
        "git": checkout(),
        "server": {name: model.pop(name, None) for name in ("options", "versions")},
        "model": model,
        "prompts": prompts.record(),
        "dataset": {
            "path": str(path),
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
            "problems": problems,
        },
        "host": platform.node(),
    }


def differences(earlier: Facts, now: Facts) -> list[str]:
    """Names of what changes answers and is not the same in both; there may be more problems and epochs now.

    Args:
        earlier: what config.json says.
        now: of the evaluation as it is to go on.
    """
    had, asked = earlier["config"], now["config"]
    names = changed(had, asked, MAY_DIFFER | {"samples", "epochs"})
    names += ["samples"] * (now["dataset"]["problems"] < earlier["dataset"]["problems"])
    names += ["epochs"] * (asked["epochs"] < had["epochs"])
    return names + [".".join(path) for path in FACTS if _at(earlier, path) != _at(now, path)]


def changed(earlier: Facts, now: Facts, free: Set[str] = MAY_DIFFER) -> list[str]:
    """Names of options, but for the free ones, that are not the same in both."""
    return [name for name, value in now.items() if name not in free and earlier.get(name) != value]


def checkout(root: Path = ROOT) -> Facts | None:
    """The commit that the evaluator's own code is of, and whether files of it were changed since.

    Args:
        root: the checkout's top.

    Returns:
        `commit` and `dirty`; None where the code is in no checkout of its own, or git cannot say.
    """
    command = ["git", "--no-optional-locks", "-C", str(root), "describe", "--always", "--exclude=*"]
    env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}  # as a hook has them
    try:
        done = subprocess.run(
            [*command, "--abbrev=40", "--dirty"], env=env, capture_output=True, text=True, timeout=GIT_S
        )
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None
    if done.returncode or not (root / ".git").exists():  # installed below somebody's checkout, it is not of that
        return None
    commit, _, dirty = done.stdout.strip().partition("-")
    return {"commit": commit, "dirty": bool(dirty)}


def sampled_as_the_model(config: Config) -> Config:
    """The options with the model's own temperature, top_p and top_k, where no temperature is given.

    Greedy where the server names no temperature of the model's.
    """
    if config.temperature is not None:
        return config
    own = entry(config).get("generation_config") or {}
    if not (temperature := own.get("temperature")):
        return config.model_copy(update={"temperature": 0.0})
    sampling = {name: own[name] for name in ("top_p", "top_k") if own.get(name) is not None}
    return config.model_copy(update={"temperature": temperature, "extra_body": sampling | config.extra_body})


def entry(config: Config) -> Facts:
    """The server's entry of the model; its id alone where there is none."""
    listed = ask_json(f"{config.base_url}/models", fails=is_closed) or {}
    entries = listed.get("data")
    models = [model for model in entries if isinstance(model, dict)] if isinstance(entries, list) else []
    return next((model for model in models if model.get("id") == config.model), {"id": config.model})


def _at(facts: Facts, path: tuple[str, ...]) -> Any:
    value: Any = facts
    for name in path:
        value = value.get(name)
    return value


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
