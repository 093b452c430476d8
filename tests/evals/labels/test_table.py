"""A table of the runs that count, with what they are trained on: scores, rewards, spans."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from made import make_results
from recorded import record, says

from deployments.activations import read_run
from evals.labels.__main__ import main, summary
from evals.labels.table import labelled, tabled
from evals.results.results import read_samples

SESSION = "evaluated"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Results of twenty problems in two modes and two variants, with a store beside them."""
    root = tmp_path_factory.mktemp("labels")
    make_results(root / "results", 20, variants=("control", "calm"), activations=says(root / "store", SESSION))
    record(root / "store", root / "results")
    return root


def facts(table: pa.Table) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(table.schema.metadata[b"labels"])
    return found


def spelled(store: Path, row: dict[str, Any], part: str) -> str | None:
    """The text of a row's span, by the run's own offsets."""
    if row[f"span.{part}"] is None:
        return None
    run = read_run(store / "_" / SESSION, row["run_id"])
    assert run.facts.text is not None
    assert run.text_offsets is not None
    first, end = (int(position - run.positions[0]) for position in row[f"span.{part}"])
    ends = [*run.text_offsets.tolist(), len(run.facts.text)]
    return run.facts.text[ends[first] : ends[end]]


def test_each_answer_has_one_row_with_its_sample_scores_and_rewards(made: Path) -> None:
    table = labelled(made / "results")
    samples = {sample.key: sample for sample in read_samples(made / "results") if sample.outcome != "failed"}
    rows = table.to_pylist()
    assert len(rows) == len(samples) == len({row["run_id"] for row in rows}) > 60
    for row in rows:
        sample = samples[f"{row['problem']}.{row['mode']}.{row['variant']}"]
        assert row["run_id"] == sample.runs[-1]["run_id"]
        assert (row["session_id"], row["sample_id"], row["turn"]) == (SESSION, sample.id, len(sample.turns) - 1)
        assert (row["outcome"], row["correct"], row["last_turn"], row["epoch"]) == (
            sample.outcome,
            sample.correct,
            True,
            1,
        )
        assert row["correct_flexible"] == sample.correct_flexible
        rewards = {name: row[f"reward.{name}"] for name in ("correctness", "efficiency", "tool_use")}
        assert (rewards, row["reward"]) == (sample.rewards, sample.reward)
    assert {row["correct"] for row in rows} == {True, False}
    assert all(
        table.schema.field(name).type == pa.list_(pa.int32(), 2) for name in table.column_names if "span" in name
    )


def test_spans_are_the_tokens_of_their_parts(made: Path) -> None:
    samples = {sample.key: sample for sample in read_samples(made / "results")}
    rows = labelled(made / "results").to_pylist()
    for row in rows:
        sample = samples[f"{row['problem']}.{row['mode']}.{row['variant']}"]
        answer = spelled(made / "store", row, "answer")
        assert (answer is None) == (sample.normalized is None)
        assert sample.normalized is None or sample.normalized in str(answer)
        calls, results = (spelled(made / "store", row, part) for part in ("tool_calls", "tool_results"))
        assert (calls is None) == (results is None) == (row["mode"] == "no-tools")
        if calls:
            assert sample.messages[1]["tool_calls"][0]["function"]["arguments"] in calls
            assert sample.messages[2]["content"] in str(results)
            assert "<|tool|>" not in str(results)
    assert sum(row["span.answer"] is not None for row in rows) > 40


def test_every_turn_is_there_where_all_are_asked_for_and_the_last_is_marked(made: Path) -> None:
    table = labelled(made / "results", turns="all")
    rows = [row for row in table.to_pylist() if row["mode"] == "with-tools"]
    assert {(row["turn"], row["last_turn"]) for row in rows} == {(0, False), (1, True)}
    first = next(row for row in rows if row["turn"] == 0)
    assert (first["span.answer"], first["span.tool_results"]) == (None, None)
    assert "calculator({" in str(spelled(made / "store", first, "tool_calls"))
    earlier = [facts(labels)["left_out"]["runs of earlier turns"] for labels in (table, labelled(made / "results"))]
    assert earlier == [0, sum(row["turn"] == 0 for row in rows)]


def test_what_is_left_out_is_counted(tmp_path: Path) -> None:
    asked = says(tmp_path / "store", SESSION)

    def some(run_id: str) -> dict[str, Any]:
        return asked(run_id) | ({"status": "failed"} if run_id.startswith(f"{3:012x}-no-tools") else {})

    make_results(tmp_path / "results", 30, activations=some, skill=0.2)
    record(tmp_path / "store", tmp_path / "results")
    kept = {path: path.read_text() for path in (tmp_path / "results" / "samples").iterdir()}
    repeated = next(path for path, text in kept.items() if '"outcome": "correct"' in text and "no-tools" in path.name)
    again = json.loads(kept[repeated])
    again["turns"][0]["activations"]["runs"][0]["run_id"] = "asked-again"
    repeated.write_text(json.dumps(again))
    found = labelled(tmp_path / "results")
    failed = [sample for sample in read_samples(tmp_path / "results") if sample.outcome == "failed"]
    told = facts(found)
    left = {"failed samples": len(failed), "answers without a stored run": 1}
    assert told["left_out"] | left == told["left_out"]
    assert told["why_no_spans"] == f"1 runs are not in {tmp_path / 'store' / '_' / SESSION}"
    ids = found["run_id"].to_pylist()
    assert "asked-again" in ids
    assert json.loads(kept[repeated])["turns"][0]["activations"]["runs"][0]["run_id"] not in ids
    assert f"left out: {len(failed)} failed samples, 1 answers without a stored run" in summary(found)


@pytest.mark.parametrize(
    ("stored", "answers", "why"),
    [
        ({"last": 3}, "some", None),
        ({"text": False}, "none", r"40 runs were stored without their text"),
        (None, "none", r"file://\S+/store/_/evaluated cannot be read from this machine: use .*"),
    ],
)
def test_without_the_rows_or_texts_of_a_part_its_span_is_null_and_the_summary_says_why(
    tmp_path: Path, stored: dict[str, Any] | None, answers: str, why: str | None
) -> None:
    options = {"modes": ("no-tools",), "skill": 1.0, "activations": says(tmp_path / "store", SESSION)}
    make_results(tmp_path / "results", 40, **options)
    if stored:
        record(tmp_path / "store", tmp_path / "results", **stored)
    table = labelled(tmp_path / "results")
    null = table["span.answer"].null_count
    assert (null < 40) if answers == "some" else (null == 40)
    assert table["span.end"].to_pylist() == [[89, 90]] * 40
    assert table["span.prompt_last"].to_pylist() == [[69, 70]] * 40
    if why is None:
        assert facts(table)["why_no_spans"] is None
    else:
        assert re.fullmatch(why, facts(table)["why_no_spans"])
        assert facts(table)["why_no_spans"] in summary(table)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"correct": None, "rewards": {}, "reward": None}, "is being scored again"),
        (None, r"samples/\S+\.json cannot be read"),
    ],
)
def test_samples_without_a_score_give_no_labels(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any] | None, told: str
) -> None:
    options = {"modes": ("no-tools",), "skill": 1.0, "activations": says(tmp_path / "store", SESSION)}
    results = make_results(tmp_path / "results", 2, **options)
    path = next((results / "samples").iterdir())
    path.write_text(json.dumps(json.loads(path.read_text()) | change) if change else "")
    assert main([str(results)]) == 2
    assert re.search(told, capsys.readouterr().err)


def test_the_command_writes_the_table_and_says_what_is_in_it(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(made / "results", tmp_path / "results")
    table = labelled(made / "results")
    assert main([str(tmp_path / "results")]) == 0
    out = tmp_path / "results" / "labels.parquet"
    said = capsys.readouterr().out
    assert pq.read_table(out).to_pylist() == table.to_pylist()
    assert said.startswith(f"{table.num_rows} runs of 20 problems; labels: outcome, correct, ")
    assert said.endswith(f"{out}\n")
    assert main([str(tmp_path / "results"), "--turns", "all", "--out", str(tmp_path / "all.parquet")]) == 0
    assert pq.read_table(tmp_path / "all.parquet").num_rows > table.num_rows


@pytest.mark.parametrize(
    ("results", "options", "says"),
    [
        ("none", [], "config.json cannot be read"),
        ("plain", [], "plain recorded no activations: run the evaluation with --collect-activations"),
        ("results", ["--out", "/no/such/place.parquet"], "/no/such"),
    ],
)
def test_what_gives_no_labels_is_said_in_one_line(
    made: Path, capsys: pytest.CaptureFixture[str], results: str, options: list[str], says: str
) -> None:
    if results == "plain" and not (made / "plain").exists():
        make_results(made / "plain", 2)
    assert main([str(made / results), *options]) == 2
    said = capsys.readouterr().err
    assert said.startswith("evals.labels: ")
    assert says in said
    assert said.count("\n") == 1


def test_texts_that_are_numbers_are_labels_as_numbers_and_long_ids_stay_texts() -> None:
    rows = [{"score": "1", "id": "1234567890123456789", "size": "1e30"}, {"score": "0.5", "id": "7", "size": "2"}]
    table = tabled(rows, {}, {})
    assert table.column("score").to_pylist() == [1.0, 0.5]
    assert table.column("id").to_pylist() == [row["id"] for row in rows]
    assert table.column("size").to_pylist() == [row["size"] for row in rows]
