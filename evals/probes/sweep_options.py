"""The options of `python -m evals.probes` and of `evals.probes.sweep`, which are the same."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

from evals.config import EvalError
from evals.probes.fitting.solver import METHODS, Method
from evals.probes.inputs.token_columns import TokenColumn

_UNFIT = re.compile(r"[^A-Za-z0-9._-]+")  # for a file's name


@dataclass(frozen=True, kw_only=True)
class Options:
    """What is probed, and how.

    Attributes:
        session: The session whose runs are the examples; with `results` it is the evaluation's.
        results: A results directory of `evals.gsm8k`: labels are columns of `evals.labels`, groups by default problems.
        inspect: A log of inspect_ai: labels are scorers, groups by default samples.
        labels: A csv, Parquet or jsonl file of labels, by `run_id` or `id`.
        label: The tag or column of the label.
        group: The tag or column of the group.
        ungrouped: Every run is its own group.
        positive: The label of the positive class.
        points: Points, or wildcards over those that are stored.
        tokens: Choices of tokens: `prompt_last`, `generated_last`, `last`, `mean`, `max`, `span:NAME` or
            `span:FIRST:END`.
        methods: `difference`, `logistic`, `ridge`.
        c: Values of C to choose from.
        folds: Folds, outer and inner.
        permutations: Labelings of the null.
        resamples: Samples of the bootstrap.
        seed: Of folds, permutations and samples.
        test_sessions: Sessions that the probe of all examples is tried on.
        skip_missing: Leave out runs without a label, a group, a point or the tokens' rows.
        store: The store's directory; None is the default one.
        ray: The address of a Ray cluster whose tasks probe the points; None for this process alone.
        out: Where results are written; None to write nothing.
        name: The probe's name; None is the label's.
        install: The address of a server that the probe is installed on as a readout; None for none.
    """

    session: str | None = None
    results: Path | None = None
    inspect: Path | None = None
    labels: Path | None = None
    label: str = "label"
    group: str | None = None
    ungrouped: bool = False
    positive: str | None = None
    points: Sequence[str] = ("layers.*.output",)
    tokens: Sequence[str] = ("prompt_last",)
    methods: Sequence[Method] = METHODS
    c: Sequence[float] = (1e-5, 1e-4, 1e-3, 1e-2, 0.1, 1.0, 10.0)
    folds: int = 5
    permutations: int = 20
    resamples: int = 2000
    seed: int = 0
    test_sessions: Sequence[str] = ()
    skip_missing: bool = False
    store: Path | None = None
    ray: str | None = None
    out: Path | None = None
    name: str | None = None
    install: str | None = None

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
        for name, least in {"permutations": 0, "resamples": 100, "seed": 0}.items():
            if getattr(self, name) < least:
                raise EvalError(f"--{name} {getattr(self, name)}: less than {least}")
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


# What `--help` says of the options with a value, and its type; a tuple's default is a list with commas between.
_HELP: dict[str, tuple[str, type]] = {
    "session": ("a session of stored runs", str),
    "results": ("or a results directory of evals.gsm8k, whose runs evals.labels labels", Path),
    "inspect": ("or a log of inspect_ai over the provider vitrine, whose scores are labels", Path),
    "labels": ("a csv, parquet or jsonl file of labels with a column run_id, or id for sample ids", Path),
    "label": ("tag or column of the label", str),
    "group": ("tag or column of the group; problem with --results and --inspect", str),
    "positive": ("the label of the positive class, against all others", str),
    "points": ("points, comma separated; * stands for one part of a name", str),
    "tokens": ("comma separated: prompt_last, generated_last, last, mean, max, span:NAME, span:FIRST:END", str),
    "methods": ("comma separated: difference, logistic, ridge", str),
    "c": ("values of C to choose from, comma separated", float),
    "folds": ("outer and inner folds", int),
    "permutations": ("permutations", int),
    "resamples": ("samples of the bootstrap", int),
    "seed": ("seed", int),
    "store": ("the store's directory; without it $VITRINE_HOME/activations", Path),
    "name": ("the probe's name; without it the label's", str),
    "install": ("the address of a server to install the probe on as a readout, http://127.0.0.1:8000", str),
}


def parse(argv: Sequence[str] | None = None) -> Options:
    """The options of a command line; argparse ends the process where one is not known.

    Raises:
        EvalError: As for `Options`.
    """
    parser = argparse.ArgumentParser(
        prog="python -m evals.probes",
        description="Fit linear probes on stored activations by nested, grouped cross-validation.",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    default: dict[str, Any] = {item.name: item.default for item in fields(Options)}
    for name, (text, kind) in _HELP.items():
        if isinstance(default[name], tuple):
            shown = ",".join(f"{value:g}" if kind is float else str(value) for value in default[name])
            parser.add_argument(f"--{name}", type=partial(_several, kind), help=f"{text} ({shown})")
        else:
            shown = "" if default[name] is None else f" ({default[name]})"
            parser.add_argument(f"--{name}", type=kind, help=text + shown)
    parser.add_argument("--ungrouped", action="store_true", help="every run is its own group")
    parser.add_argument(
        "--test-session", dest="test_sessions", action="append", metavar="SESSION", help="another session to test on"
    )
    parser.add_argument(
        "--skip-missing",
        action="store_true",
        help="skip runs without a label, a group, one of the points or the tokens' rows",
    )
    parser.add_argument("--ray", nargs="?", const="auto", metavar="ADDRESS", help="probe the points in tasks of Ray")
    parser.add_argument("--out", type=Path, required=True, help="a directory for the results")
    return Options(**vars(parser.parse_args(argv)))


def _several(kind: type, given: str) -> list[Any]:
    return [kind(part) for part in given.split(",") if part]
