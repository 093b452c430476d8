"""The runs of inspect_ai's logs with their scores, and a probe of one."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from evals.config import EvalError
from evals.labels.__main__ import main
from evals.labels.inspect_log import labelled
from evals.probes.__main__ import main as probes

pytestmark = pytest.mark.skipif(find_spec("inspect_ai") is None, reason="inspect_ai is not installed: make lint")


def test_a_scorer_is_a_label_and_the_sample_the_group(logs: dict[str, Path], tmp_path: Path) -> None:
    out = tmp_path / "labels.parquet"
    assert main(["--inspect", str(logs["sums"]), "--out", str(out)]) == 0
    rows = pq.read_table(out).to_pylist()
    assert len(rows) == len({row["run_id"] for row in rows}) == len({row["problem"] for row in rows}) == 16
    for row in rows:
        assert row["few_boxes"] == (int(row["problem"].split("-")[1]) < 4)
        assert isinstance(row["match"], bool)
        assert row["span.end"][0] > row["span.prompt_last"][0] > 0


def test_calls_of_another_model_are_no_rows_and_counted(logs: dict[str, Path]) -> None:
    table = labelled(logs["sums"])
    left = json.loads(table.schema.metadata[b"labels"])["left_out"]
    assert (table.num_rows, left["calls of other models"]) == (16, 16)


def test_the_runs_of_a_retried_evaluation_are_of_one_session(
    evaluate: Callable[..., list[Path]], tmp_path: Path
) -> None:
    env = {"TRIED": str(tmp_path / "tried")}
    (first,) = evaluate("retried.py", "-M", "capture=true", "--max-samples", "1", fails=True, **env)
    (log,) = evaluate(str(first), retry=True, **env)
    rows = labelled(log).to_pylist()
    assert sorted(row["problem"] for row in rows) == ["first", "second"]
    assert len({row["session_id"] for row in rows}) == 1


def test_of_a_tool_loop_the_last_turn_counts_in_each_epoch(logs: dict[str, Path]) -> None:
    last, every = (labelled(logs["loop"], turns=turns) for turns in ("last", "all"))
    assert last["epoch"].to_pylist() == [1, 2]
    assert set(last["last_turn"].to_pylist()) == {True}
    left = json.loads(last.schema.metadata[b"labels"])["left_out"]
    assert left["runs of earlier turns"] == every.num_rows - 2 > 0


def test_a_probe_is_trained_from_a_log(logs: dict[str, Path], tmp_path: Path) -> None:
    options = ["--inspect", str(logs["sums"]), "--label", "few_boxes", "--methods", "ridge", "--folds", "3"]
    options += ["--permutations", "3", "--out", str(tmp_path / "probe")]
    assert probes([*options, "--points", "layers.2.output", "--tokens", "mean"]) == 0
    headline = json.loads((tmp_path / "probe" / "probes.json").read_text())["headline"]
    assert headline["n"] == headline["groups"] == 16
    assert headline["auroc"] > 0.6


def test_a_log_without_runs_and_a_file_that_is_no_log_are_refused(unrecorded: Path, tmp_path: Path) -> None:
    with pytest.raises(EvalError, match="has no stored runs"):
        labelled(unrecorded)
    (tmp_path / "none.eval").write_text("nothing")
    with pytest.raises(EvalError, match="cannot be read"):
        labelled(tmp_path / "none.eval")
