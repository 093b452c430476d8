"""All that is needed to repeat a run, as config.json holds it, and how two of these differ."""

import hashlib
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deployments import __version__
from evals.client import ask_json
from evals.config import Config
from evals.prompts import Prompts
from evals.serving_config import OF_ONE_CALL

if TYPE_CHECKING:
    from evals.problems import Chosen  # which imports Ray

PACKAGES = ("ray", "pyarrow", "httpx", "pydantic", "torch", "transformers", "nnsight", "numpy")
# How a run reaches the server and where it writes: the answers do not hang on these.
FREE = {"base_url", "parallel", "timeout", "retries", "results_dir", "wait_healthy", "variants_file"}
FREE |= {"few_shot_file", "transfer_activations", "serve"} | OF_ONE_CALL
Facts = dict[str, Any]


def facts(config: Config, prompts: Prompts, path: Path, chosen: "Chosen") -> Facts:
    """What config.json says before the first request.

    Args:
        config: the options, with the model's name.
        prompts: all texts.
        path: of the dataset.
        chosen: the problems of the run.
    """
    return {
        "config": config.model_dump(mode="json", exclude={"resume"}),
        "versions": {"python": platform.python_version()}
        | {"vitrine": __version__}
        | {name: _version(name) for name in PACKAGES},
        "model": _model(config),
        "server": _server(config.base_url),
        "prompts": prompts.record(),
        "dataset": {
            "path": str(path),
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
            "split": config.split,
            "problems": chosen.problems.num_rows,
            "repeated": chosen.repeated,
            "ids": hashlib.sha256("\n".join(chosen.problems["id"].to_pylist()).encode()).hexdigest(),
        },
        "host": platform.node(),
    }


def differences(earlier: Facts, now: Facts) -> list[str]:
    """Names of what changes answers or scores and is not the same in both."""
    names = [name for name in now["config"] if name not in FREE]
    found = [name for name in names if earlier["config"].get(name) != now["config"][name]]
    if earlier["prompts"] != now["prompts"]:
        found.append("prompts")
    told = (earlier["model"].get("structure"), now["model"].get("structure"))
    if None not in told and told[0] != told[1]:
        found.append("model.structure")
    if earlier["versions"]["vitrine"] != now["versions"]["vitrine"]:
        found.append("versions.vitrine")
    return found + [f"dataset.{part}" for part in ("sha256", "ids") if earlier["dataset"][part] != now["dataset"][part]]


def _model(config: Config) -> Facts:
    """The server's entry of the model, with its structure where the server tells it."""
    listed = ask_json(f"{config.base_url}/models") or {}
    entry = next((one for one in listed.get("data", []) if one.get("id") == config.model), {"id": config.model})
    structure = ask_json(f"{config.base_url}/model/structure", {"model": config.model})
    return {**entry, "structure": structure}


def _server(base_url: str) -> Facts:
    """What the server says of itself; None for what it does not tell."""
    root = base_url.removesuffix("/v1")
    described = ask_json(f"{root}/openapi.json") or {}
    return {
        "health": ask_json(f"{root}/health"),
        "env": ask_json(f"{root}/env"),
        "info": described.get("info"),
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
