"""The options of `python -m evals.probes` and of `evals.probes.sweep`, which are the same."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

from deployments.command_line import parser
from evals.config import EvalError
from evals.probes.fits import METHODS, Method
from evals.probes.token_columns import TokenColumn

_UNFIT = re.compile(r"[^A-Za-z0-9._-]+")  # for a file's name


def _option(default: Any, text: str, kind: type = str, **more: Any) -> Any:
    """A field with its help, and the type that its value has on a command line."""
    return field(default=default, metadata={"help": text, "type": kind} | more)


@dataclass(frozen=True, kw_only=True)
class Options:
    """What is probed, and how; `python -m evals.probes --help` describes each field."""

    session: str | None = _option(None, "session of stored runs; or --results or --inspect", group="runs and labels")
    results: Path | None = _option(None, "results directory of evals.gsm8k", Path)
    inspect: Path | None = _option(None, "log of inspect_ai; its scores are the labels", Path)
    store: Path | None = _option(None, "directory of the store (default: $VITRINE_HOME/activations)", Path)
    labels: Path | None = _option(None, "CSV, Parquet or JSONL file of labels with a column run_id or id", Path)
    label: str = _option("label", "tag or column of the label")
    positive: str | None = _option(None, "label of the positive class, against all others")
    group: str | None = _option(None, "tag or column of the group (default: problem with --results and --inspect)")
    ungrouped: bool = _option(False, "every run is a group", action="store_true")
    skip_missing: bool = _option(
        False, "skip runs without a label, a group, a point or the tokens", action="store_true"
    )
    test_sessions: Sequence[str] = _option(
        (), "further session to test on; repeatable", flag="--test-session", action="append", metavar="STRING"
    )
    points: Sequence[str] = _option(("layers.*.output",), "hook points; * matches one part of a name", group="probes")
    tokens: Sequence[str] = _option(
        ("prompt_last",),
        "any of prompt_last, generated_last, last, mean, reasoning, answer, role:ROLE, turn:TURN, span:NAME, "
        "span:FIRST:END",
    )
    methods: Sequence[Method] = _option(METHODS, f"any of {', '.join(METHODS)}")
    c: Sequence[float] = _option((1e-5, 1e-4, 1e-3, 1e-2, 0.1, 1.0), "values of C to choose from", float)
    folds: int = _option(5, "outer and inner folds", int)
    permutations: int = _option(20, "label permutations of the null distribution", int)
    seed: int = _option(0, "seed of folds and permutations", int)
    out: Path | None = _option(None, "directory for the results", Path, required=True, group="results")
    name: str | None = _option(None, "name of the probe (default: the label's)")
    install: str | None = _option(None, "address of a server to install the probe on, such as http://127.0.0.1:8000")

    def __post_init__(self) -> None:
        """Check what needs no store.

        Raises:
            EvalError: An option has no such value, or does not go with another.
        """
        for name in ("points", "tokens", "methods", "test_sessions"):
            if isinstance(getattr(self, name), str):
                raise EvalError(f"{name}: give a list of names")
        if [self.results, self.inspect, self.session].count(None) != 2:
            raise EvalError("--session, --results or --inspect: give one of them")
        if self.evaluated and (self.labels is not None or self.test_sessions):
            raise EvalError(
                "--labels and --test-session need --session, and cannot be combined with --results or --inspect",
            )
        if self.ungrouped and self.group:
            raise EvalError("--ungrouped and --group exclude each other")
        if not (self.ungrouped or self.group or self.evaluated):
            raise EvalError(
                "--group: name the tag of what runs have in common (a subject, a template, a problem), so that no "
                "group is both trained and tested on; --ungrouped where runs have nothing in common"
            )
        if unknown := [method for method in self.methods if method not in METHODS]:
            raise EvalError(f"--methods {unknown[0]!r}: none of {', '.join(METHODS)}")
        if not self.c or not all(math.isfinite(value) and value > 0 for value in self.c):
            raise EvalError("--c: give positive numbers")
        for name in ("permutations", "seed"):
            if getattr(self, name) < 0:
                raise EvalError(f"--{name} {getattr(self, name)}: less than 0")
        if self.name is not None and (_UNFIT.search(self.name) or not self.name or self.name.startswith(".")):
            raise EvalError(f"--name {self.name!r}: letters, digits, '.', '_' and '-', not '.' first")
        if not self.choices or not self.points or not self.methods:
            raise EvalError("--points, --tokens and --methods: name at least one of each")

    @property
    def evaluated(self) -> bool:
        """Whether an evaluation names the runs and their labels."""
        return self.results is not None or self.inspect is not None

    @property
    def choices(self) -> list[TokenColumn]:
        """The choices of tokens.

        Raises:
            EvalError: One is none.
        """
        return [TokenColumn.parse(name) for name in dict.fromkeys(self.tokens)]

    @property
    def probe_name(self) -> str:
        """The name of the probe and its file."""
        return self.name or _UNFIT.sub("-", self.label).lstrip(".") or "probe"

    @property
    def group_column(self) -> str | None:
        """The tag or column of the group; None where every run is its own."""
        return self.group or ("problem" if self.evaluated and not self.ungrouped else None)


def parse(argv: Sequence[str] | None = None) -> Options:
    """The options of a command line; argparse ends the process where one is not known.

    Raises:
        EvalError: As for `Options`.
    """
    return Options(**vars(command().parse_args(argv)))


def command() -> argparse.ArgumentParser:
    """The command's options."""
    text = "Fit linear probes on stored activations by nested, grouped cross-validation."
    example = "--session statements --group subject --out probes/truth"
    usage = "%(prog)s [options]"
    made = parser("evals.probes", text, example, usage=usage, argument_default=argparse.SUPPRESS)
    for item in fields(Options):
        given = dict(item.metadata)
        flag, kind, default = given.pop("flag", f"--{item.name.replace('_', '-')}"), given.pop("type"), item.default
        if title := given.pop("group", None):
            add = made.add_argument_group(title).add_argument
        if "action" not in given:
            given["metavar"] = {Path: "PATH", str: "STRING"}.get(kind, "N")
            given["type"] = partial(_several, kind) if isinstance(default, tuple) else kind
            if isinstance(default, tuple):
                shown = ",".join(f"{value:g}" if kind is float else str(value) for value in default)
                given["help"] += f"; comma-separated (default: {shown})"
            elif default is not None:
                given["help"] += f" (default: {default})"
        add(flag, dest=item.name, **given)
    return made


def _several(kind: type, given: str) -> list[Any]:
    return [kind(part) for part in given.split(",") if part]
