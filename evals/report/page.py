"""The results of an evaluation as one page, report.html, that needs nothing else.

The page runs one script, which its policy names by hash, and reaches no network. What the model wrote is compressed
data in it, opened sample by sample.
"""

import base64
import gzip
import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow.parquet as pq
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from evals.config import EvalError
from evals.report.charts import SHARES, around_zero, stacked
from evals.results.results import TRAJECTORIES, read_json
from evals.results.tally import OUTCOMES, unswept
from evals.scoring import RULES
from evals.task.trajectory import sample_key

NAME = "report.html"
EMBED_BYTES = 24 << 20  # of compressed trajectories
PAGES = Path(__file__).parent / "pages"
ROWS = 2000  # samples of a block of the table
STEPS_BYTES = 128 << 10  # of trajectories, uncompressed, that are opened together
MAX_TRAJECTORY = 1 << 20  # bytes of a trajectory that is still in the page
QUESTION = 120  # characters of it that the table has
COLUMNS = ["id", "mode", "variant", "epoch", "outcome", "gold", *RULES, "reward", "turns", "tool_calls"]
COLUMNS += ["prompt_tokens", "completion_tokens", "latency_s", "question"]
DETAILS = ("question", "error", "finish_reason", "session_id", "run_ids")

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


class Block(NamedTuple):
    """JSON, gzipped, in base64. Of `table`, columns of samples; of `steps`, the trajectories of some by their keys."""

    kind: str
    number: int
    text: str


def blocks(directory: Path, embed_bytes: int) -> Iterator[Block]:
    """All samples, and the trajectories of the first ones, in the order of their problems' ids, as many as fit.

    In a table `block` is the number of the steps' block that has the sample's trajectory, or null.

    Args:
        directory: the results, with samples.parquet and trajectories.
        embed_bytes: about the most that trajectories take in the page.
    """
    number, left = 0, embed_bytes
    with pq.ParquetFile(directory / "samples.parquet") as file:
        rewards = [name for name in file.schema_arrow.names if name.startswith("reward_")]
        columns = [*dict.fromkeys([*COLUMNS, *DETAILS, *rewards])]
        for table, batch in enumerate(file.iter_batches(batch_size=ROWS, columns=columns)):
            rows = batch.to_pylist()
            held: dict[str, Any] = {}
            size = 0
            for place, row in enumerate(rows, 1):
                key = sample_key(row["id"], row["mode"], row["variant"], row["epoch"])
                text = _read(directory / TRAJECTORIES / f"{key}.jsonl") if left > 0 else None
                row["block"] = None if text is None else number
                if text is not None:
                    held[key] = _detail(row, text, rewards)
                    size += len(text)
                if held and (size >= STEPS_BYTES or place == len(rows)):
                    yield (block := _block("steps", number, held))
                    number, left, held, size = number + 1, left - len(block.text), {}, 0
            yield _block("table", table, _columns(rows))


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8") if path.stat().st_size <= MAX_TRAJECTORY else None
    except FileNotFoundError:
        return None


def _detail(row: dict[str, Any], text: str, rewards: list[str]) -> dict[str, Any]:
    detail = {name: row[name] for name in DETAILS}
    detail["rewards"] = {name.removeprefix("reward_"): row[name] for name in rewards}
    detail["steps"] = [json.loads(line) for line in text.rstrip("\n").split("\n")]  # no other line break
    return detail


def _columns(rows: list[dict[str, Any]]) -> dict[str, list[Any]]:
    columns = {name: [row[name] for row in rows] for name in (*COLUMNS, "block")}
    columns["question"] = [question[:QUESTION] for question in columns["question"]]
    columns["latency_s"] = [round(seconds, 4) for seconds in columns["latency_s"]]
    return columns


def _block(kind: str, number: int, content: Any) -> Block:
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
    return Block(kind, number, base64.b64encode(gzip.compress(text.encode(), 6, mtime=0)).decode())
