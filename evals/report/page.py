"""`python -m evals.report DIR`: the results of a run as one page, report.html, that needs nothing else.

The page runs one script, which its policy names by hash, and reaches no network. What the model wrote is compressed
data in it, opened sample by sample.
"""

import argparse
import base64
import hashlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from deployments.permissions import restrict
from evals.config import EvalError
from evals.report.charts import SHARES, around_zero, histogram, lines, stacked
from evals.report.page_data import blocks
from evals.results import activation_stats
from evals.results.results import read_json, scored_earlier
from evals.results.tally import OUTCOMES, PAIRS, pair_name, unswept
from evals.scoring import RULES

NAME = "report.html"
EMBED_BYTES = 24 << 20  # of compressed trajectories
PAGES = Path(__file__).parent / "pages"

Record = dict[str, Any]


def write_report(directory: Path, *, embed_bytes: int = EMBED_BYTES) -> Path:
    """Writes report.html of a results directory, whole or not at all, in memory that does not grow with the run.

    Args:
        directory: with summary.json, samples.parquet and trajectories; what else is there is used, too.
        embed_bytes: about the most that trajectories take in the page. Of a longer run those of some problems are
            in it, and the others are named by their files.

    Returns:
        The page.

    Raises:
        EvalError: the directory holds no finished evaluation.
    """
    path = directory / NAME
    part = path.with_suffix(".part")
    context = report_context(directory)
    with part.open("w", encoding="utf-8") as file:
        file.writelines(template("report.html.jinja").generate(context | {"blocks": blocks(directory, embed_bytes)}))
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


def report_context(directory: Path) -> Record:
    """What the report shows, but for the samples.

    Raises:
        EvalError: the directory holds no finished evaluation.
    """
    summary, config = finished(directory), read_json(directory / "config.json")
    conditions, plain = summary["conditions"], unswept(summary)
    stats_file = directory / activation_stats.NAME
    stats = read_json(stats_file) if stats_file.exists() else None
    sites = activation_stats.sites(stats["points"]) if stats else {}
    script = (PAGES / "samples.js").read_text(encoding="utf-8")
    return {
        "s": summary,
        "rules": RULES,
        "others": [rule for rule in RULES if rule != summary["rule"]],
        "pairs": [(a, b, pair_name(a, b)) for a, b in PAIRS],
        "config": config,
        "plain": plain,
        "modes": {mode: [c for c in plain.values() if c["mode"] == mode] for mode in summary["modes"]},
        "variants": list(dict.fromkeys(c["variant"] for c in conditions.values())),
        "kinds": OUTCOMES,
        "shares": SHARES,
        "differences": _differences(summary["paired"], conditions),
        "difference_scale": around_zero(bound for pair in summary["paired"] for bound in pair["ci95"] or ()),
        "most_steered": max(
            (abs(p["difference"] or 0) for p in summary["paired"] if p["kind"] == "steering"), default=0
        ),
        "outcomes": {key: stacked(c["outcomes"]) for key, c in conditions.items()},
        "lengths": histogram(directory, "completion_tokens", _usual(plain, "completion_tokens_per_sample"), plain),
        "latencies": histogram(directory, "latency_s", _usual(plain, "latency_s"), plain),
        "rewards": list(dict.fromkeys(name for c in conditions.values() for name in c["rewards"])),
        "weights": summary["config"].get("rewards") or {},
        "stats": stats,
        "several": [c for c in conditions.values() if c.get("epochs")],
        "sites": {site: lines(points) for site, points in sites.items()},
        "script": Markup(script),
        "script_hash": f"sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}",
    }


def finished(directory: Path) -> Record:
    """The summary of a results directory.

    Raises:
        EvalError: the directory holds no finished evaluation, or one of an earlier version.
    """
    path = directory / "summary.json"
    if not path.is_file():
        raise EvalError(f"{directory} has no finished evaluation: there is no {path.name}")
    summary = read_json(path)
    if "rule" not in summary:
        raise scored_earlier(directory)
    return summary


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


def _usual(conditions: Record, name: str) -> float:
    return max((c[name]["p95"] or 0.0 for c in conditions.values()), default=0.0)


def main(argv: Sequence[str] | None = None) -> int:
    """Writes the page of a results directory anew.

    Args:
        argv: the options; without it the process's own.

    Returns:
        0; 2 where there is no finished evaluation.
    """
    parser = argparse.ArgumentParser(prog="python -m evals.report", description="Write report.html again.")
    parser.add_argument("directory", type=Path, help="the results directory")
    args = parser.parse_args(argv)
    restrict(args.directory)
    try:
        finished(args.directory)
        activation_stats.write_stats(args.directory)
        print(write_report(args.directory))
    except (EvalError, OSError) as error:
        print(f"evals.report: {error}", file=sys.stderr)
        return 2
    return 0
