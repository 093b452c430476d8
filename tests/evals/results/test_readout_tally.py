"""AUROC of readouts is scikit-learn's over the means of tokens, and is told as unknown where it is."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score

from evals.results.readout_tally import ReadoutTally
from evals.server.readout_client import ReadoutValues
from evals.task.trajectory import Sample, Turn

TOLD = {"truth": {"labels": ["true", "kind"], "values": 2}}
Rows = list[list[float | None]]
VALUES = st.sampled_from([-2.0, -0.5, 0.0, 0.25, 1.0, None])


def sample(number: int, correct: bool | None, turns: list[Rows]) -> Sample:
    made = [
        Turn(
            finish_reason="stop",
            prompt_tokens=3,
            completion_tokens=len(rows),
            latency_s=1.0,
            activations=None,
            readouts=ReadoutValues(tokens=["x"] * len(rows), values={"truth": rows}),
        )
        for rows in turns
    ]
    times = {"started": 0.0, "ended": 1.0, "latency_s": 1.0}
    return Sample(
        id=str(number), mode="no-tools", variant="control", question="?", gold="1", turns=made, messages=[], **times
    ).model_copy(update={"correct": correct})


def told(*samples: Sample) -> dict[str, Any]:
    tally = ReadoutTally(TOLD)
    for one in samples:
        tally.add(one)
    return tally.summary()


ROWS = st.lists(st.tuples(VALUES, st.floats(-9, 9)).map(list), min_size=1, max_size=5)


@given(answers=st.lists(ROWS, min_size=4, max_size=12))
def test_auroc_is_of_the_means_over_tokens_and_of_the_last_one(answers: list[Rows]) -> None:
    correct = [number % 3 == 0 for number in range(len(answers))]
    summary = told(*[sample(n, correct[n], [rows[:1], rows[1:]]) for n, rows in enumerate(answers)])
    assert [one["label"] for one in summary["auroc"]] == ["true", "kind"]
    for place, found in enumerate(summary["auroc"]):
        numbers = [[row[place] for row in rows] for rows in answers]
        known = [[value for value in one if value is not None] for one in numbers]
        assert_area(found["mean"], correct, [float(np.mean(one)) if one else None for one in known])
        assert_area(found["last"], correct, [one[-1] for one in numbers])
        every = sum(known, [])
        spread = summary["tokens"][place]
        assert spread["tokens"] == len(every)
        if every:
            assert (spread["mean"], spread["sd"]) == pytest.approx((np.mean(every), np.std(every)), abs=1e-6)


def assert_area(found: dict[str, Any], correct: list[bool], scores: list[float | None]) -> None:
    known = [(right, score) for right, score in zip(correct, scores, strict=True) if score is not None]
    assert found["samples"] == len(known)
    if len({right for right, _ in known}) == 2:
        assert found["auroc"] == pytest.approx(roc_auc_score(*zip(*known, strict=True)))
    else:
        assert (found["auroc"], bool(found["why_not"])) == (None, True)


def test_failed_samples_and_answers_without_values_have_no_part() -> None:
    right = sample(0, True, [[[1.0, 0.0]]])
    summary = told(right, sample(1, None, [[[9.0, 9.0]]]), sample(2, False, []), sample(3, False, [[]]))
    assert summary["auroc"][0]["mean"]["samples"] == 1
    assert summary["auroc"][0]["mean"]["why_not"] == "every answer is right"
    assert told(sample(1, None, []))["auroc"] == []
