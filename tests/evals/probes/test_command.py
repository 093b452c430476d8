"""The command: its files and page, labels from results and files, and mistakes as one line and status 2."""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from made import make_results
from probed import Made, statements, store
from recorded import POINT, record, says

import evals.probes
from deployments.activations.facts import RunInfo
from evals.config import EvalError
from evals.labels.table import labelled
from evals.probes import sweep
from evals.probes.__main__ import main
from evals.probes.labels import RunLabels, from_file

HOSTILE = "<script>alert(1)</script>"
Change = Callable[[list[Made]], object]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = statements(groups=20, tokens=3)
    for one in made:
        one.words = (one.words[0], " is", f" {HOSTILE}")
    return store(tmp_path_factory.mktemp("command") / "store", "here", made)


def options(directory: Path, out: Path, **changed: str | None) -> list[str]:
    given = {"session": "here", "group": "group", "store": str(directory), "out": str(out), "methods": "ridge"}
    given |= {"permutations": "3"}
    for name, value in changed.items():
        given[name.replace("_", "-")] = value  # type: ignore[assignment]
    return [part for name, value in given.items() if value is not None for part in (f"--{name}", value)]


def test_the_command_says_the_headline_and_writes_a_page_that_needs_nothing_else(
    directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(options(directory, tmp_path / "out")) == 0
    own = json.loads((tmp_path / "out" / "probes.json").read_text())["headline"]
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].startswith(f"AUROC {own['auroc']:.3f}, 95% interval {own['auroc_low']:.3f} to ")
    assert shown[-1] == str(tmp_path / "out" / "report.html")
    page = (tmp_path / "out" / "report.html").read_text()
    assert "<script" not in page
    assert " is &lt;script&gt;alert(1)" in page
    assert not re.search(r"""(?:src|href)=["'](?!#)|url\(|@import""", page)
    for section in ("Headline", "Sweep", "Most certain, and wrong", "permuted labels, 5% to 95%"):
        assert section in page


BAD: dict[str, tuple[Change, dict[str, str | None], str]] = {
    "one class": (
        lambda runs: [one.tags.update(label="true") for one in runs],
        {},
        "--label: 80 examples have one class, 'true' (80); two classes are needed",
    ),
    "three classes": (
        lambda runs: [one.tags.update(label=str(i % 3)) for i, one in enumerate(runs)],
        {},
        "--label: 3 labels, '0' (27), '1' (27), '2' (26): choose one with --positive",
    ),
    "no such class": (
        lambda runs: None,
        {"positive": "maybe"},
        "--positive 'maybe': no example has this label; there are 'true'",
    ),
    "labels are missing": (
        lambda runs: [one.tags.pop("label") for one in runs[:7]],
        {},
        "of 80 runs 7 have no label (as run-0-0); use --skip-missing to skip such runs",
    ),
    "groups are missing": (lambda runs: [one.tags.pop("group") for one in runs[:3]], {}, "of 80 runs 3 have no group"),
    "not finite": (
        lambda runs: [one.rows["layers.2.output"].fill_(float("nan")) for one in runs[:5]],
        {},
        "--points layers.2.output: 5 of 80 examples have values that are not finite",
    ),
    "several models": (
        lambda runs: [setattr(one, "model", "other") for one in runs[:20]],
        {},
        "its runs are of several models, 60 of fake/model, 20 of other: collect each",
    ),
    "several dtypes": (
        lambda runs: [one.rows.update({"layers.0.output": one.rows["layers.0.output"].half()}) for one in runs[:20]],
        {},
        "layers.0.output has several dtypes or shapes, 60 of float32 (24,), 20 of float16 (24,)",
    ),
    "no such point": (
        lambda runs: None,
        {"points": "mlp"},
        "--points mlp was not recorded; there is layers.0.output, ",
    ),
    "no such rows": (
        lambda runs: [setattr(one, "prompt_tokens", 1) for one in runs],
        {},
        "80 have no stored rows for --tokens prompt_last",
    ),
    "no group": (lambda runs: None, {"group": None}, "--group: name the tag"),
    "no such tokens": (
        lambda runs: None,
        {"tokens": "first"},
        "--tokens 'first': none of prompt_last, generated_last",
    ),
    "no such session": (lambda runs: None, {"session": "nowhere"}, "--session nowhere: "),
    "no such method": (lambda runs: None, {"methods": "lda"}, "--methods 'lda': none of difference, logistic, ridge"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_in_one_line_with_counts(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change, changed, message = BAD[case]
    made = statements(groups=20)
    change(made)
    assert main(options(store(tmp_path / "store", "here", made), tmp_path / "out", **changed)) == 2
    said = capsys.readouterr().err.splitlines()
    assert said[-1].startswith("evals.probes: ")
    assert message in said[-1]
    assert not (tmp_path / "out").exists()


def test_runs_that_lack_something_are_left_out_on_request(tmp_path: Path) -> None:
    made = statements(groups=20)
    for one in made[:7]:
        del one.tags["label"]
    store(tmp_path, "here", made)
    found = sweep(session="here", group="group", store=tmp_path, skip_missing=True, methods=["ridge"])
    assert found.headline["n"] == 73
    assert found.document["left_out"] == {"have no label": 7}


@pytest.mark.parametrize(("key", "kind"), [("run_id", "csv"), ("id", "jsonl")])
def test_labels_that_come_later_join_by_run_or_sample(directory: Path, tmp_path: Path, key: str, kind: str) -> None:
    rows = [
        {key: one.run_id if key == "run_id" else one.sample_id, "mine": i % 4 < 2}
        for i, one in enumerate(statements(groups=20))
    ]
    file = tmp_path / f"labels.{kind}"
    lines = [",".join(rows[0])] + [f"{row[key]},{str(row['mine']).lower()}" for row in rows]
    file.write_text("\n".join(lines if kind == "csv" else map(json.dumps, rows)))
    found = sweep(session="here", labels=file, label="mine", group="group", store=directory, methods=["ridge"])
    assert found.document["positive"] == "true"
    assert {one["run_id"]: one["label"] for one in found.document["scores"]} == {
        f"run-{i // 4}-{i % 4}": "true" if i % 4 < 2 else "false" for i in range(80)
    }


LABELS: dict[str, tuple[str, str, dict[str, str | None], str]] = {
    "a row without a label": ("jsonl", '{"id": "s0-1"}\n{"id": "s0-0", "label": true}', {}, "have no label (as run-"),
    "no column": ("jsonl", '{"id": "s0-1"}\n{"mine": true}', {}, "no column 'label'; there is id, mine"),
    "a cell too many": ("csv", "id,mine\ns0-1,true,oh", {}, "no column 'label'; there is id, mine"),
    "no span": (
        "csv",
        'id,label,span.a\ns0-1,true,"[3, x]"',
        {"tokens": "span:a"},
        "--labels: span.a is '[3, x]', not two positions such as [3, 5]",
    ),
}


@pytest.mark.parametrize("case", LABELS)
def test_bad_labels_files_are_refused_in_one_line(
    case: str, directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kind, content, changed, message = LABELS[case]
    file = tmp_path / f"labels.{kind}"
    file.write_text(content)
    assert main(options(directory, tmp_path / "out", labels=str(file), **changed)) == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_rows_of_labels_without_a_run_are_counted_and_those_of_a_test_session_have_one(tmp_path: Path) -> None:
    made = statements(groups=20)
    store(tmp_path, "here", made)
    others = statements(groups=20, seed=1)
    for one in others:
        one.run_id += "-other"
    store(tmp_path, "there", others)
    file = tmp_path / "labels.csv"
    rows = [f"{one.run_id},{one.tags['label']}" for one in (*made, *others)]
    given: dict[str, Any] = {"session": "here", "labels": file, "group": "group", "store": tmp_path}
    given |= {"methods": ["difference"], "permutations": 0, "points": ["layers.1.output"]}
    file.write_text("\n".join(["run_id,label", *rows]))
    assert sweep(**given, test_sessions=["there"]).document["left_out"] == {}
    found = sweep(**given)
    assert found.document["left_out"] == {"are rows of labels without a stored run": 80}


def test_spans_of_a_csv_file_are_read_as_positions(tmp_path: Path) -> None:
    file = tmp_path / "labels.csv"
    file.write_text('run_id,label,span.a\nr,true,"[3, 5]"\nq,true,')
    source = from_file(file, "label", None, ["a"])
    facts = RunInfo("r", "here", "fake/model", created=1.0, prompt_tokens=3, tokens=6)
    assert source.of(facts) == RunLabels("true", None, {"a": (3, 5)})


def test_results_of_an_evaluation_are_labelled_by_their_problems(tmp_path: Path) -> None:
    results = make_results(tmp_path / "results", 30, activations=says(tmp_path / "store", "evaluated"))
    record(tmp_path / "store", results)
    fast: dict[str, Any] = {"results": results, "points": [POINT], "methods": ["ridge"]}
    found = sweep(label="correct", tokens=["mean"], **fast)
    table = {row["run_id"]: row for row in labelled(results).to_pylist()}
    assert found.document["group"] == "problem"
    scored = {row["run_id"]: (row["group"], row["label"]) for row in found.document["scores"]}
    assert scored == {  # earlier turns and failed samples are no examples
        run: (row["problem"], "true" if row["correct"] else "false") for run, row in table.items()
    }
    spans = sweep(label="correct", tokens=["span:answer"], skip_missing=True, **fast)
    assert spans.headline["n"] == sum(row["span.answer"] is not None for row in table.values())
    with pytest.raises(EvalError, match="no column 'right'"):
        sweep(label="right", **fast)


def test_results_from_another_machine_are_probed_on_a_copy_of_their_store(tmp_path: Path) -> None:
    results = make_results(tmp_path / "results", 30, activations=says(tmp_path / "store", "evaluated"))
    record(tmp_path / "store", results)
    (tmp_path / "store").rename(tmp_path / "copy")
    fast: dict[str, Any] = {"results": results, "points": [POINT], "methods": ["ridge"]}
    with pytest.raises(EvalError, match="cannot be read from this machine: use --transfer-activations"):
        sweep(label="correct", tokens=["mean"], **fast)
    assert sweep(label="correct", tokens=["mean"], store=tmp_path / "copy", **fast).headline["n"] > 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda one: setattr(one, "model", "another"), "its runs are of the model another, the probe is of fake/model"),
        (lambda one: setattr(one, "revision", "v2"), "its runs are of the model fake/model (v2), the probe"),
        (
            lambda one: one.tags.update(label="unknown") if one.run_id.endswith("3") else None,
            "it has labels that here does not have, 'unknown' (20): choose one label with --positive",
        ),
    ],
)
def test_another_models_session_or_other_labels_are_no_test_of_transfer_and_known_before_any_fit(
    change: Callable[[Made], object], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("evals.probes.pipeline._probe", None)
    other = statements(groups=20)
    for one in other:
        change(one)
    store(tmp_path, "here", statements(groups=20))
    store(tmp_path, "another", other)
    with pytest.raises(EvalError, match=re.escape(f"--test-session another: {message}")):
        sweep(session="here", group="group", store=tmp_path, test_sessions=["another"])


def test_without_scikit_learn_the_command_says_what_to_install(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    assert main(options(directory, tmp_path)) == 2
    assert capsys.readouterr().err == (
        "evals.probes: scikit-learn is not installed: pip install -c constraints.txt -e '.[probes]'\n"
    )
    with pytest.raises(ImportError, match=re.escape("'.[probes]'")):
        _: Any = evals.probes.sweep
