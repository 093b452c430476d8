"""The results of an evaluation as one page, report.html, that needs nothing else.

The page runs one script, which its policy names by hash, and reaches no network. What the model wrote is compressed
data in it, opened sample by sample.
"""

import base64
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from evals.config import EvalError
from evals.report.charts import SHARES, around_zero, stacked
from evals.report.page_data import blocks
from evals.results.results import read_json
from evals.results.tally import OUTCOMES, unswept
from evals.scoring import RULES

NAME = "report.html"
EMBED_BYTES = 24 << 20  # of compressed trajectories
PAGES = Path(__file__).parent / "pages"

Record = dict[str, Any]


def write_report(
    directory: Path,
    compared: Sequence[tuple[str, list[tuple[str, Record]]]] = (),
    *,
    embed_bytes: int = EMBED_BYTES,
) -> Path:
    """Writes report.html of a results directory, whole or not at all.

    Args:
        directory: with summary.json, samples.parquet and trajectories.
        compared: how other evaluations differ from this one: a condition, and paired differences by their names.
        embed_bytes: about the most that trajectories take in the page. Of a longer evaluation those of some problems
            are in it, and the others are named by their files.

    Returns:
        The page.

    Raises:
        EvalError: the directory holds no finished evaluation.
    """
    summary, config = finished(directory), read_json(directory / "config.json")
    conditions, plain = summary["conditions"], unswept(summary)
    shown = [*summary["paired"], *(pair for _, pairs in compared for _, pair in pairs)]
    script = (PAGES / "samples.js").read_text(encoding="utf-8")
    context = {
        "s": summary,
        "rules": RULES,
        "config": config,
        "plain": plain,
        "modes": {mode: [c for c in plain.values() if c["mode"] == mode] for mode in summary["modes"]},
        "variants": list(dict.fromkeys(c["variant"] for c in conditions.values())),
        "kinds": OUTCOMES,
        "shares": SHARES,
        "differences": _differences(summary["paired"], conditions),
        "difference_scale": around_zero(bound for pair in shown for bound in pair["ci95"] or ()),
        "compared": compared,
        "most_steered": max(
            (abs(p["difference"] or 0) for p in summary["paired"] if p["kind"] == "steering"), default=0
        ),
        "outcomes": {key: stacked(c["outcomes"]) for key, c in conditions.items()},
        "rewards": list(dict.fromkeys(name for c in conditions.values() for name in c["rewards"])),
        "weights": summary["config"].get("rewards") or {},
        "several": [c for c in conditions.values() if c.get("epochs")],
        "script": Markup(script),
        "script_hash": f"sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}",
        "blocks": blocks(directory, embed_bytes),
    }
    path = directory / NAME
    part = path.with_suffix(".part")
    with part.open("w", encoding="utf-8") as file:
        file.writelines(template("report.html.jinja").generate(context))
    part.replace(path)
    return path


def template(name: str) -> Any:
    """A page's template, with everything that it is given escaped, but for the project's own style."""
    environment = Environment(
        loader=PackageLoader("evals.report", "pages"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    environment.filters["tojson_text"] = lambda value: json.dumps(value, indent=2, ensure_ascii=False)
    environment.globals["style"] = Markup((PAGES / "style.css").read_text(encoding="utf-8"))
    return environment.get_template(name)


def finished(directory: Path) -> Record:
    """The summary of a results directory.

    Raises:
        EvalError: the directory holds no finished evaluation.
    """
    path = directory / "summary.json"
    if not path.is_file():
        raise EvalError(f"{directory} has no finished evaluation: there is no {path.name}")
    return read_json(path)


def _differences(paired: list[Record], conditions: Record) -> list[tuple[str, str, str, str, list[tuple[str, Record]]]]:
    """The tables of differences: title, three heads, and the rows by their labels."""
    tables: dict[str, tuple[str, str, str, str, list[tuple[str, Record]]]] = {}
    for pair in paired:
        a, b = conditions[pair["a"]], conditions[pair["b"]]
        if pair["kind"] == "steering":
            head = (f"Steered less {a['variant']}, {a['mode']}", "condition", f"{a['variant']} alone", "steered alone")
        elif pair["kind"] == "variant":
            head = (f"Variants less {a['variant']}, {a['mode']}", "variant", f"{a['variant']} alone", "variant alone")
        else:
            head = (f"{b['mode']} less {a['mode']}", "variant", f"{a['mode']} alone", f"{b['mode']} alone")
        tables.setdefault(head[0], (*head, []))[-1].append((b["variant"], pair))
    return list(tables.values())
