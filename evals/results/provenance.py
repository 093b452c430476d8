"""The record that repeats a run, config.json, and how two of them differ."""

import hashlib
import os
import platform
import subprocess
from collections.abc import Callable, Iterator, Sequence, Set
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from deployments import __version__
from evals.config import Config
from evals.server.answers import is_absent
from evals.server.readout_client import installed
from evals.server.server_queries import ask_json, is_closed
from evals.serving_config import OF_ONE_CALL
from evals.task import steering
from evals.task.problems import ChosenProblems
from evals.task.prompts import Prompts

PACKAGES = ("ray", "pyarrow", "httpx", "pydantic", "torch", "transformers", "nnsight", "numpy")
# How a run reaches the server, which files it reads and where it writes: the answers do not hang on these. What the
# files hold is compared for itself; answers that are there are scored and rewarded anew. With a longer timeout those
# that were late are asked again; a shorter one is another run.
MAY_DIFFER = {"base_url", "parallel", "workers", "timeout", "retries", "max_outage", "wait_healthy", "results_dir"}
MAY_DIFFER |= {"max_failures", "dataset", "variants_file", "few_shot_file", "transfer_activations", "serve"}
MAY_DIFFER |= {"rule", "rewards"} | OF_ONE_CALL
ROOT = Path(__file__).parents[2]
DEFAULTS = Config.model_construct(session_id="", results_dir=Path()).model_dump(mode="json")
GIT_S = 10.0  # that git may take: the checkout may lie on a slow disk
Facts = dict[str, Any]
SERVER_FACTS: dict[str, Callable[[Facts], Any]] = {  # what a server must report again if it did before
    "model.revision": lambda facts: facts["model"].get("revision"),
    "model.structure": lambda facts: facts["model"].get("structure"),
    # Of a server that has the route this is never None: a default preset that is set in the middle shows.
    "interventions": lambda facts: facts.get("interventions"),
    "interventions.readouts": lambda facts: facts.get("gates"),
    "server.readouts": lambda facts: facts.get("readouts"),
    "server.options.dtype": lambda facts: (facts["server"].get("options") or {}).get("dtype"),
}


def facts(config: Config, prompts: Prompts, path: Path, chosen: ChosenProblems) -> Facts:
    """What config.json says before the first request.

    Args:
        config: the options, with the model's name.
        prompts: all texts.
        path: of the dataset.
        chosen: the problems of the run.
    """
    model = _model(config)
    server = _server(config.base_url) | {name: model.pop(name, None) for name in ("options", "versions")}
    return {
        "config": config.model_dump(mode="json", exclude={"resume"}),
        "versions": {"python": platform.python_version()}
        | {"vitrine": __version__}
        | {name: _version(name) for name in PACKAGES},
        "git": checkout(),
        "model": model,
        "server": server,
        "interventions": default_preset(config),
        "gates": _gates(config),
        "readouts": installed(config.base_url, config.model, config.readouts),
        "prompts": prompts.record(),
        "dataset": {
            "path": str(path),
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
            "split": config.split,
            "problems": chosen.problems.num_rows,
            "repeated": chosen.repeated,
            "ids": ids_hash(chosen.problems["id"].to_pylist()),
        },
        "host": platform.node(),
    }


def ids_hash(ids: Sequence[str]) -> str:
    """What config.json has of the problems' ids, in the order in which they are asked."""
    return hashlib.sha256("\n".join(ids).encode()).hexdigest()


def differences(earlier: Facts, now: Facts, ids: Sequence[str] = ()) -> list[str]:
    """Names of what changes answers or scores and is not the same in both.

    A run may go on with more problems, where those that it had come first, and with more epochs.

    Args:
        earlier: what config.json says.
        now: of the run as it is to go on.
        ids: of its problems, in order.
    """
    options = DEFAULTS | earlier["config"]  # a run of an earlier version did not know all
    found = changed(options, now["config"], MAY_DIFFER | {"samples", "epochs"})
    found += ["epochs"] * (now["config"]["epochs"] < options["epochs"])
    if now["config"]["timeout"] < earlier["config"]["timeout"]:
        found.append("timeout")
    if _texts(earlier["prompts"]) != _texts(now["prompts"]):
        found.append("prompts")
    for name, fact in SERVER_FACTS.items():
        reported = [what for facts in (earlier, *earlier.get("resumed", [])) if (what := fact(facts)) is not None]
        if reported and reported[-1] != fact(now):
            found.append(name)
    if earlier["versions"]["vitrine"] != now["versions"]["vitrine"]:
        found.append("versions.vitrine")
    had, asked = earlier["dataset"], now["dataset"]
    found += ["dataset.sha256"] * (had["sha256"] != asked["sha256"])
    goes_on = had["sha256"] == asked["sha256"] and had["ids"] == ids_hash(ids[: had["problems"]])
    if had["ids"] != asked["ids"] and not goes_on:
        found.append("dataset.ids" if options["samples"] == now["config"]["samples"] else "samples")
    return found


def changed(earlier: Facts, now: Facts, free: Set[str] = MAY_DIFFER) -> list[str]:
    """Names of options, but for the free ones, that are not the same in both."""
    return [name for name, value in now.items() if name not in free and earlier.get(name) != value]


def resumed(earlier: Facts, now: Facts) -> Facts:
    """What config.json says once an earlier run goes on.

    Where the server, the machine or the evaluator's code is another one, `resumed` has them, too, for each such time.
    """
    record = earlier | {name: now[name] for name in ("config", "dataset") if name in now}
    parts = {name: now.get(name) for name in ("model", "server", "git", "versions", "host")}
    last = earlier.get("resumed", [earlier])[-1]
    if any(last.get(name) != part for name, part in parts.items()):
        record["resumed"] = [*earlier.get("resumed", []), parts]
    return record


def checkout(root: Path = ROOT) -> Facts | None:
    """The commit that the evaluator's own code is of, and whether files of it were changed since.

    Args:
        root: the checkout's top.

    Returns:
        `commit` and `dirty`; None where the code is in no checkout of its own, or git cannot say.
    """
    top = _git(root, "rev-parse", "--show-toplevel")
    commit = _git(root, "rev-parse", "HEAD")
    changed = _git(root, "status", "--porcelain", "--untracked-files=no")
    # Installed below somebody's checkout, it is not of that.
    if top is None or commit is None or changed is None or Path(top) != root.resolve():
        return None
    return {"commit": commit, "dirty": bool(changed)}


def _git(root: Path, *arguments: str) -> str | None:
    command = ["git", "--no-optional-locks", "-C", str(root), *arguments]
    env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}  # as a hook has them
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=GIT_S)
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _texts(prompts: Facts) -> Facts:
    """What the model is shown; not which file the examples were read from, and not what an option says as well."""
    few_shot = prompts.get("few_shot")
    texts = {name: text for name, text in prompts.items() if name != "tools"}  # which earlier versions did not record
    return texts | {"few_shot": few_shot and few_shot["examples"]}


def sampled_as_the_model(config: Config) -> Config:
    """The options with the model's own temperature, top_p and top_k, where no temperature is given.

    Greedy where the server names no temperature of the model's.
    """
    own = _entry(config).get("generation_config") or {} if config.temperature is None else {}
    given = {"temperature": own.get("temperature") or 0.0} if config.temperature is None else {}
    for name in ("top_p", "top_k"):
        if getattr(config, name) is None and own.get("temperature"):
            given[name] = own.get(name)
    return config.model_copy(update=given)


def _model(config: Config) -> Facts:
    """The server's entry of the model, with its structure if the server reports it."""
    structure = ask_json(f"{config.base_url}/model/structure", {"model": config.model}, is_absent)
    return {**_entry(config), "structure": structure}


def _entry(config: Config) -> Facts:
    """The server's entry of the model; its id alone where there is none."""
    listed = ask_json(f"{config.base_url}/models", fails=is_closed) or {}
    entries = listed.get("data")
    found = [one for one in entries if isinstance(one, dict)] if isinstance(entries, list) else []
    return next((one for one in found if one.get("id") == config.model), {"id": config.model})


def _gates(config: Config) -> Facts | None:
    """The ids of the readouts and autoencoders that `--interventions` use, by their names; None without any."""
    asked = (steering.find(config, cell.name)[1] for cell in steering.cells(config))
    names = sorted({name for interventions in asked for name in _named(interventions)})
    found = {name: ask_json(f"{config.base_url}/readouts/{name}", fails=is_closed) or {} for name in names}
    return {name: one.get("id") for name, one in found.items()} or None


def _named(value: Any) -> Iterator[str]:
    """The readouts' names in interventions, however deep their conditions are."""
    if isinstance(value, dict):
        yield from (str(value[key]) for key in ("readout", "sae") if key in value)
        value = list(value.values())
    for inner in value if isinstance(value, list) else ():
        yield from _named(inner)


def default_preset(config: Config) -> Facts | None:
    """The preset that the server applies by default to the model; None where it has no presets."""
    listed = ask_json(f"{config.base_url}/interventions", {"limit": "1000"}, is_absent)
    presets = (listed or {}).get("data")
    if not isinstance(presets, list):
        return None
    own = (one for one in presets if isinstance(one, dict) and one.get("default"))
    default = next((one for one in own if one.get("model") == config.model), None)
    if default is None:
        return {"default": None}
    body = ask_json(f"{config.base_url}/interventions/{default.get('name')}") or {}
    # By its name comes the key's own preset, if there is one; `created` tells the defaults of a name apart.
    return {"default": (body if body.get("default") else {}) | default}


def _server(base_url: str) -> Facts:
    """What the server reports of itself; None for what it does not report."""
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
