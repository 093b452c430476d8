"""The shipped true and false statements: the words alone do not give the label away."""

from __future__ import annotations

import json
import runpy
from collections import Counter, defaultdict
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


def test_every_topic_has_forty_groups_of_four_statements(rows: list[dict[str, Any]]) -> None:
    groups = Counter((row["topic"], row["group"]) for row in rows)
    assert set(groups.values()) == {4}
    assert Counter(topic for topic, _ in groups) == dict.fromkeys(TOPICS, 40)


def test_ids_and_texts_are_unique(rows: list[dict[str, Any]]) -> None:
    for field in ("id", "text"):
        assert len({row[field] for row in rows}) == len(rows)


@pytest.mark.parametrize("field", ["subject", "ending"])
def test_subjects_and_endings_are_true_once_and_false_once_in_their_group(
    field: str, rows: list[dict[str, Any]]
) -> None:
    labels = defaultdict(list)
    for row in rows:
        labels[row["group"], row[field]].append(row["label"])
    assert all(sorted(found) == [False, True] for found in labels.values())


def test_no_subject_is_in_two_groups_and_none_contains_its_ending(rows: list[dict[str, Any]]) -> None:
    groups = defaultdict(set)
    for row in rows:
        groups[row["subject"]].add(row["group"])
        assert row["ending"].split()[-1].lower() not in row["subject"].lower()
    assert {len(found) for found in groups.values()} == {1}


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
