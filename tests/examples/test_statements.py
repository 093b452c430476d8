"""The shipped true and false statements: the words alone do not give the label away."""

from __future__ import annotations

import json
import runpy
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import StratifiedGroupKFold
from sklearn.pipeline import make_pipeline, make_union

STATEMENTS = Path(__file__).parents[2] / "examples" / "statements"
TOPICS = ["animals", "countries", "opposites", "spanish"]


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    return [json.loads(line) for line in (STATEMENTS / "statements.jsonl").read_text(encoding="utf-8").splitlines()]


def test_the_shipped_file_is_what_its_maker_writes() -> None:
    made = runpy.run_path(str(STATEMENTS / "make_statements.py"))["jsonl"]()
    assert (STATEMENTS / "statements.jsonl").read_text(encoding="utf-8") == made


@pytest.mark.parametrize("field", ["subject", "ending"])
def test_subjects_and_endings_are_true_once_and_false_once_in_their_group(
    field: str, rows: list[dict[str, Any]]
) -> None:
    labels = defaultdict(list)
    for row in rows:
        labels[row["group"], row[field]].append(row["label"])
    assert all(sorted(found) == [False, True] for found in labels.values())


@pytest.mark.parametrize("topics", [*([topic] for topic in TOPICS), TOPICS], ids="-".join)
def test_words_and_characters_do_not_predict_the_label(topics: list[str], rows: list[dict[str, Any]]) -> None:
    chosen = [row for row in rows if row["topic"] in topics]
    texts, labels, groups = (np.array([row[field] for row in chosen]) for field in ("text", "label", "group"))
    aurocs = []
    for train, test in StratifiedGroupKFold(5, shuffle=True, random_state=0).split(texts, labels, groups):
        words, characters = TfidfVectorizer(ngram_range=(1, 2)), TfidfVectorizer(analyzer="char", ngram_range=(2, 5))
        baseline = make_pipeline(make_union(words, characters), LogisticRegression()).fit(texts[train], labels[train])
        aurocs.append(roc_auc_score(labels[test], baseline.decision_function(texts[test])))
    assert np.mean(aurocs) == pytest.approx(0.5, abs=0.05)
