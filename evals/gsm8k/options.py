"""The options of `python -m evals.gsm8k`: from flags, a file, or the evaluation that is resumed."""

import argparse
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from deployments.command_line import meanings, parser
from deployments.options import home
from evals.config import HUB_DATASET, STAGES, Config, EvalError, in_order, in_ray_job
from evals.results.results import read_json

Given = dict[str, Any]
FILES = ("dataset", "few_shot")  # options that keep the path of a file
OF_ONE_CALL = {"resume", "keep_running", "stages"}  # what no later call on the same results takes over
# What PyYAML raises for a scalar that is not of its tag, as `!!int x` or the 31st of February.
OF_SCALARS = (ValueError, LookupError, AttributeError, TypeError)

# The flags, and the type or the choices of each; a list is of several words. `Config` describes them.
OPTIONS: dict[str, type | Sequence[str]] = {
    "base_url": str,
    "model": str,
    "serve": str,
    "keep_running": bool,
    "dataset": str,
    "samples": int,
    "seed": int,
    "mode": ["no-tools", "with-tools", "both"],
    "variants": str,
    "few_shot": str,
    "epochs": int,
    "parallel": int,
    "max_tokens": int,
    "temperature": float,
    "interventions": str,
    "sweep": list,
    "collect_activations": bool,
    "capture": str,
    "transfer_activations": bool,
    "inline_activations": int,
    "results_dir": str,
    "resume": bool,
    "stages": str,
}
# Each group's title, by its first option.
GROUPS = {"base_url": "server", "dataset": "problems and prompts", "epochs": "generation"}
GROUPS |= {"collect_activations": "activations", "results_dir": "results"}
FURTHER = [name for name in Config.model_fields if name not in OPTIONS and name != "server_options"]


def parse_args(argv: Sequence[str] | None = None) -> Config:
    """The options as a `Config`; a bad one ends the program with argparse's message and status 2.

    Flags win over the file of `--config`, and that over the options of the evaluation that `--resume`, or the stage
    `report` without `generate`, goes on with.
    """
    made = command()
    flags = {name: value for name, value in vars(made.parse_args(argv)).items() if value is not None}
    try:
        file = flags.pop("config", None)
        given = (read_config(file) if file else {}) | flags
        name = f"gsm8k-{datetime.now(UTC):%Y%m%dT%H%M%SZ}"
        given["results_dir"] = results_path(given.get("results_dir"), name)
        stages = in_order(given.get("stages", STAGES))
        if given.get("resume") is True or ("report" in stages and "generate" not in stages):
            given = earlier_options(given["results_dir"]) | given
        given |= {option: from_here(given[option], option) for option in FILES if option in given}
        given.setdefault("session_id", name)
        return Config(**given)
    except ValidationError as error:
        first = error.errors()[0]
        option = f"{flag(str(first['loc'][0]))}: " if first["loc"] else ""
        made.error(option + first["msg"].removeprefix("Value error, "))
    except ValueError as error:
        made.error(str(error))


def flag(name: str) -> str:
    """What an option is called in a message: its flag, or its name in a file where it has none."""
    if name == "server_options":
        return "--server-option"
    return f"--{name.replace('_', '-')}" if name in OPTIONS else name


def read_config(file: str) -> Given:
    """The options that a YAML file gives, by the names of the flags with `_` for `-`.

    Raises:
        ValueError: no such file, no map of options, or an option that there is not.
    """
    try:
        given = yaml.safe_load(Path(file).expanduser().read_text(encoding="utf-8")) or {}
    except (OSError, RuntimeError, yaml.YAMLError, *OF_SCALARS) as error:
        raise ValueError(f"--config {file}: {error}") from error
    if not isinstance(given, dict):
        raise ValueError(f"--config {file}: not a map of options")
    if unknown := [str(name) for name in given if name not in Config.model_fields]:
        known = ", ".join(Config.model_fields)
        raise ValueError(f"--config {file}: no option {', '.join(unknown)}; there are {known}")
    return given


def from_here(value: object, name: str) -> object:
    """A file that an option names, absolute, so that `--resume` from another directory finds it.

    In a Ray job a relative path stays: it is of a file that each job brings in its own copy of the working directory.

    Args:
        value: the option's value; what is no path is left to `Config`.
        name: the option's.

    Raises:
        ValueError: no path can be written so.
    """
    if not isinstance(value, str) or value in ("demo", HUB_DATASET) or value.lstrip("-").isdecimal():
        return value
    path = _path(value, name)
    return str(path if in_ray_job() else path.absolute())


def _path(value: object, name: str) -> Path:
    if isinstance(value, str | Path) and str(value) and "\0" not in str(value):
        try:
            str(value).encode()
            return Path(value).expanduser()
        except (UnicodeEncodeError, RuntimeError):  # half a character; `~name` of nobody
            pass
    raise ValueError(f"{flag(name)}: {value!r} is no path")


def earlier_options(directory: Path) -> Given:
    """The options of the evaluation in a results directory, without those that are of one call alone.

    Raises:
        ValueError: there is none.
    """
    try:
        options = read_json(directory / "config.json")["config"]
        return {name: value for name, value in options.items() if name in Config.model_fields.keys() - OF_ONE_CALL}
    except (EvalError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"--results-dir {directory} has no options of an evaluation: {error}") from error


def results_path(given: object, name: str) -> Path:
    """Where results go, absolute: what was given, else `results/<name>`, in a Ray job below `$VITRINE_HOME`.

    Args:
        given: the option's value, if any.
        name: the evaluation's name, for the default.

    Raises:
        ValueError: no path; or a relative one in a Ray job, whose working directory is a copy that is thrown away.
    """
    path = None if given is None else _path(given, "results_dir")
    if not in_ray_job():
        return (path or Path("results") / name).absolute()
    if path and not path.is_absolute():
        raise ValueError(
            f"--results-dir {path}: relative to a Ray job's working directory, a copy that Ray throws away; give an "
            f"absolute path, or none for {home() / 'results' / name}"
        )
    return path or home() / "results" / name


def command() -> argparse.ArgumentParser:
    """The command's options. Defaults live in `Config` alone: an option that was not given is None here."""
    text = "Evaluate a model on GSM8K, with recorded activations and interventions."
    example = "--serve smollm2 --base-url http://127.0.0.1:0/v1 --samples 20"
    made = parser("evals.gsm8k", text, example, usage="%(prog)s [options]")
    text = f"YAML file of options, such as max_tokens: 256; flags override it. Only there: {', '.join(FURTHER)}"
    made.add_argument("--config", metavar="FILE", help=text)
    texts = meanings(Config)
    for name, kind in OPTIONS.items():
        text = texts[name]
        if name in GROUPS:
            add = made.add_argument_group(GROUPS[name]).add_argument
        if kind is bool:
            add(flag(name), help=text, action=argparse.BooleanOptionalAction)
        elif kind is list:
            add(flag(name), help=text, nargs="+", metavar="NAME=VALUES")
        else:
            default = Config.model_fields[name].default
            shown = f" (default: {default})" if isinstance(default, str | int | float) and default != "" else ""
            given: dict[str, Any] = {"type": kind} if isinstance(kind, type) else {"choices": kind}
            add(flag(name), help=text + shown, **given)
        if name == "serve":
            text = "server option; repeatable"
            add("--server-option", dest="server_options", metavar="NAME=VALUE", action="append", help=text)
    return made
