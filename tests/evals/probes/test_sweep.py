"""A sweep finds what is in the activations, says what is not, and writes it."""

import inspect
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from probed import MODEL, Made, statements, store
from safetensors import safe_open
from sklearn.linear_model import LogisticRegression, RidgeClassifier
from sklearn.metrics import roc_auc_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from evals.config import EvalError
from evals.probes import Options, Result, sweep

FAST: dict[str, Any] = {"group": "group", "permutations": 4}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("probes") / "store"


@pytest.fixture(scope="module")
def found(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Result:
    store(directory, "planted", statements())
    store(directory, "again", statements(groups=25, seed=7))
    out = tmp_path_factory.mktemp("out")
    return sweep(session="planted", store=directory, out=out, test_sessions=["again"], name="truth", **FAST)


def run(directory: Path, session: str, runs: list[Made], **options: Any) -> Result:
    store(directory, session, runs)
    return sweep(session=session, store=directory, **(FAST | options))


def test_the_function_has_the_commands_options_and_defaults() -> None:
    own, command = (inspect.signature(of).parameters.values() for of in (sweep, Options))
    assert [(one.name, one.default) for one in own] == [(one.name, one.default) for one in command]


def test_the_planted_layer_is_chosen_in_every_fold(found: Result) -> None:
    own = found.headline
    assert {one["point"] for one in own["chosen"]} == {own["point"]} == {"layers.1.output"}
    assert own["auroc_low"] < own["auroc"] < own["auroc_high"]
    assert own["auroc_low"] < 0.855 < own["auroc_high"] + 0.05  # of the direction itself: strength 1.5
    assert own["beats_text"] is True
    assert own["text_auroc"] == own["length_auroc"] == 0.5  # every word is as often true as false
    assert own["control_low"] < 0.5 < own["control_high"] < own["auroc_low"]
    assert own["faults"] == []
    assert (own["n"], own["positives"], own["groups"], own["folds"]) == (160, 80, 40, 5)


def test_rows_have_their_null_and_a_band_that_holds_one_half_elsewhere(found: Result) -> None:
    assert len(found.rows) == 3 * 3
    for row in found.rows:
        assert row["auroc_low"] < row["auroc"] < row["auroc_high"]
        assert (row["auroc_low"] > 0.5) == (row["point"] == "layers.1.output")
        assert row["control_low"] <= row["control_auroc"] <= row["control_high"]
        assert abs(row["control_auroc"] - 0.5) < 0.1


def test_one_document_has_all_that_the_function_gives(found: Result) -> None:
    out = found.out
    assert out is not None
    assert json.loads((out / "probes.json").read_text()) == json.loads(json.dumps(found.document))
    assert sorted(path.name for path in out.iterdir()) == ["probes.json", "report.html", "truth.safetensors"]
    by_group: dict[str, set[int]] = {}
    for one in found.document["scores"]:
        by_group.setdefault(one["group"], set()).add(one["fold"])
    assert len(by_group) == 40
    assert all(len(folds) == 1 for folds in by_group.values())


def test_the_probe_file_is_a_readout_that_tells_the_classes_apart(found: Result, directory: Path) -> None:
    assert found.out is not None
    with safe_open(found.out / "truth.safetensors", "pt") as file:
        about, probe = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    description = about.pop("description")
    assert about == {
        "name": "truth",
        "model": MODEL,
        "point": "layers.1.output",
        "kind": "linear",
        "activation": "sigmoid",
        "labels": '["true"]',
        "tokens": "prompt_last",
        "method": found.headline["method"],
    }
    assert "160 examples in 40 groups" in description
    shapes = {"weight": (1, 24), "bias": (1,), "mean": (24,), "std": (24,), "slope": (1,), "offset": (1,)}
    assert {name: tuple(tensor.shape) for name, tensor in probe.items()} == shapes
    assert {tensor.dtype for tensor in probe.values()} == {torch.float32}
    test = statements(groups=25, seed=7)
    rows = torch.cat([made.rows["layers.1.output"] for made in test])
    scores = ((rows - probe["mean"]) / probe["std"]) @ probe["weight"].T + probe["bias"]
    area = roc_auc_score([made.tags["label"] == "true" for made in test], scores[:, 0])
    transfer = found.document["transfer"][0]
    assert transfer["auroc"] == pytest.approx(area)
    assert (transfer["groups"], transfer["shared_groups"]) == (25, 25)
    assert area > 0.75
    chances = (probe["slope"] * scores + probe["offset"]).sigmoid()
    assert 0.3 < chances.mean() < 0.7


@pytest.mark.parametrize(
    ("method", "hidden"), [("logistic", 12), ("logistic", 200), ("ridge", 200), ("difference", 200)]
)
def test_scores_and_probabilities_come_from_training_folds_alone(directory: Path, method: str, hidden: int) -> None:
    """The same one step after the other, without a projection: nested folds, standardization and Platt scaling."""
    made = statements(groups=30, hidden=hidden, layers=1, planted=0, seed=3)
    c = [0.001, 1.0] if method != "difference" else [1.0]
    found = run(directory, f"{method}-{hidden}", made, methods=[method], c=c, permutations=0)
    scored = found.document["scores"]
    by_run = {one.run_id: one.rows["layers.0.output"][0].numpy() for one in made}
    rows = np.stack([by_run[one["run_id"]] for one in scored])
    positive, of = np.array([one["label"] == "true" for one in scored]), np.array([one["fold"] for one in scored])

    def scores(without: set[int], fold: int, value: float) -> np.ndarray:
        training = ~np.isin(of, list(without))
        if method == "difference":
            scaler = StandardScaler().fit(rows[training])
            means = [scaler.transform(rows[training & (positive == one)]).mean(axis=0) for one in (True, False)]
            return np.asarray((scaler.transform(rows[of == fold]) - (means[0] + means[1]) / 2) @ (means[0] - means[1]))
        logistic = LogisticRegression(C=value, tol=1e-6, max_iter=10_000)
        model = make_pipeline(StandardScaler(), logistic if method == "logistic" else RidgeClassifier(alpha=1 / value))
        return np.asarray(model.fit(rows[training], positive[training]).decision_function(rows[of == fold]))

    for outer in range(5):
        inner = [fold for fold in range(5) if fold != outer]
        held = {value: [scores({outer, fold}, fold, value) for fold in inner] for value in c}
        areas = {
            value: np.mean([roc_auc_score(positive[of == f], s) for f, s in zip(inner, held[value], strict=True)])
            for value in c
        }
        best = max(c, key=lambda value: areas[value])
        assert found.headline["chosen"][outer]["c"] == (None if method == "difference" else best)
        own = scores({outer}, outer, best)
        np.testing.assert_allclose([one["score"] for one in scored if one["fold"] == outer], own, atol=0.05)
        calibrated = make_pipeline(StandardScaler(), LogisticRegression())
        labels = np.concatenate([positive[of == fold] for fold in inner])
        calibrated.fit(np.concatenate(held[best])[:, None], labels)
        chances = calibrated.predict_proba(own[:, None])[:, 1]
        np.testing.assert_allclose([one["probability"] for one in scored if one["fold"] == outer], chances, atol=0.01)


def test_noise_has_an_interval_around_one_half(directory: Path) -> None:
    own = run(directory, "noise", statements(planted=None, seed=5)).headline
    assert own["auroc_low"] < 0.5 < own["auroc_high"]
    assert own["beats_text"] is False


def test_what_the_text_tells_is_not_credited_to_the_probe(directory: Path) -> None:
    made = statements(groups=30, strength=3.0)
    for one in made:
        one.words = (one.words[0], " is", " so" if one.tags["label"] == "true" else " not")
    own = run(directory, "text", made, methods=["ridge"]).headline
    assert own["auroc"] > 0.9
    assert own["text_auroc"] == 1.0
    assert own["beats_text"] is False


@pytest.mark.parametrize(("place", "area"), [(2, 1.0), (3, 0.5)])
def test_the_text_baseline_reads_what_the_probe_can_and_no_more(directory: Path, place: int, area: float) -> None:
    """The last token of the prompt alone is stored, and a word of the label's is that token or the one after it."""
    made = statements(groups=20)
    for one in made:
        words = [one.words[0], " is", " ", "."]
        words[place] = " so" if one.tags["label"] == "true" else " not"
        one.words, one.first = words, 2
    assert run(directory, f"read-{place}", made, methods=["difference"]).headline["text_auroc"] == area


def test_white_space_alone_has_no_text_baseline_and_the_reason(directory: Path) -> None:
    made = statements(groups=20)
    for i, one in enumerate(made):
        one.words = (" ", "\n" * (i // 4 + 1), " ")
    own = run(directory, "white", made, methods=["difference"]).headline
    assert own["text_auroc"] is own["beats_text"] is None
    assert own["reasons"]["text_auroc"] == "the text before the tokens is empty or white space"


def test_a_word_that_is_true_in_one_group_and_false_in_the_others_is_a_fault_of_the_design(directory: Path) -> None:
    random, made = torch.Generator().manual_seed(0), []
    words = torch.randn(30, 24, generator=random)
    for group in range(30):
        for label, word in (("true", group), ("false", (group + 7) % 30)):
            tags = {"label": label, "group": str(group)}
            rows = {"layers.0.output": words[word : word + 1] + 0.1 * torch.randn(1, 24, generator=random)}
            made.append(Made(f"design-{group}-{label}", rows, tags, (f"Here{group}", " is", f" w{word}")))
    own = run(directory, "design", made).headline
    assert own["auroc_high"] < 0.5
    assert own["faults"][0].startswith("Fault of the design: the interval of the headline's AUROC ends at 0.")


def test_few_groups_have_no_interval_and_the_reason(directory: Path) -> None:
    own = run(directory, "few", statements(groups=12), permutations=0).headline
    assert [own[name] for name in ("auroc_low", "auroc_high", "beats_text", "control_auroc")] == [None] * 4
    assert own["reasons"]["auroc_low"] == own["reasons"]["beats_text"] == "12 groups; an interval needs 20"
    assert own["reasons"]["control_auroc"] == "no permutations"


def test_choices_of_tokens_read_the_rows_that_they_name(directory: Path) -> None:
    """The label is in the second of four tokens alone, once large and positive: the mean sees it, too."""
    random, made = torch.Generator().manual_seed(0), []
    for i in range(120):
        rows = torch.randn(4, 8, generator=random)
        rows[1, 0] += 4.0 if i % 2 else 0.0
        tags = {"label": "true" if i % 2 else "false", "group": str(i // 4)}
        chat = {"roles": [0, 1, 2, 2], "turns": [0, 1, 2, 2]}
        made.append(Made(f"t{i}", {"norm.output": rows}, tags, (f"a{i}", " b", " c", " d"), prompt_tokens=2, **chat))
    tokens = ["prompt_last", "generated_last", "mean", "span:2:4", "span:1:2", "role:user", "turn:-1", "answer"]
    found = run(directory, "tokens", made, tokens=tokens, points=["norm.output"], methods=["logistic"], permutations=0)
    areas = {row["tokens"]: row["auroc"] for row in found.rows}
    assert list(areas) == tokens
    assert areas["prompt_last"] == areas["span:1:2"] == areas["role:user"] > 0.95
    assert areas["turn:-1"] == areas["answer"] == areas["span:2:4"]
    assert areas["mean"] > 0.8
    assert max(areas["generated_last"], areas["span:2:4"]) < 0.65
    assert found.headline["tokens"] in ("prompt_last", "span:1:2", "role:user")


def test_runs_that_repeat_others_count_once_and_equal_prompts_share_a_fold(directory: Path) -> None:
    """Each of 60 texts with random labels three times: who has read a text before knows its label."""
    labels = np.random.default_rng(0).permutation(np.arange(60) % 2).tolist()
    rows = torch.randn(60, 1, 24, generator=torch.Generator().manual_seed(0))
    made = [
        Made(f"run-{copy}-{i}", {"norm.output": rows[i]}, {"label": str(labels[i])}, (f"text{i}",), 1, f"s{i}")
        for copy in range(3)
        for i in range(60)
    ]
    options: dict[str, Any] = {"group": None, "ungrouped": True, "points": ["norm.output"]}
    found = run(directory, "thrice", made, **options)
    assert found.document["left_out"] == {"repeat the prompt and sample of another run": 120}
    assert (found.headline["n"], found.headline["groups"]) == (60, 60)
    assert {type(one["label"]) for one in found.document["scores"]} == {int}  # so that == 1 compares
    for one in made:
        one.sample_id = one.run_id
    found = run(directory, "resampled", made, positive=1, **options)
    assert (found.headline["n"], found.headline["groups"]) == (180, 60)
    assert found.headline["auroc_low"] < 0.5
    made[-1].sample_id, made[-1].tags["label"] = made[59].sample_id, str(1 - labels[59])
    with pytest.raises(EvalError, match=r"1 runs repeat .* with another label \(run-0-59 '\d' and run-2-59 '\d'\)"):
        run(directory, "unequal", made, **options)


def test_ungrouped_examples_have_selectivity_where_last_tokens_differ(directory: Path) -> None:
    made = statements(groups=40, strength=3.0)
    for i, one in enumerate(made):
        one.words = (f"It{i}", " is", f" {i % 25}")
    own = run(directory, "ungrouped", made, group=None, ungrouped=True, methods=["logistic"]).headline
    assert own["groups"] == own["n"] == 160
    assert own["control_accuracy"] < 0.75
    assert own["selectivity"] > 0.1
    same = sweep(session="planted", store=directory, ungrouped=True, permutations=2, methods=["difference"])
    assert same.headline["selectivity"] is None
    assert "end in 2 types of tokens" in same.headline["reasons"]["selectivity"]
