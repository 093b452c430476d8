"""What samples of one condition come to."""

import pytest

from evals.results.tally import ConditionTally
from evals.scoring import Rule
from evals.task.trajectory import Sample, Turn, scored


def answered(text: str, rule: Rule, epoch: int) -> Sample:
    turn = Turn(finish_reason="stop", prompt_tokens=1, completion_tokens=1, latency_s=1.0, activations=None)
    times = {"started": 0.0, "ended": 1.0, "latency_s": 1.0}
    said = {"turns": [turn], "messages": [{"role": "assistant", "content": text}]}
    one = Sample(id="a", mode="no-tools", variant="control", question="?", gold="18", epoch=epoch, **times, **said)
    return scored(one, rule)


def test_of_as_many_votes_the_first_epoch_decides_in_any_order_of_files() -> None:
    tally = ConditionTally("strict")
    for epoch, text in ((1, "#### 18"), (10, "#### 7"), (11, "#### 7"), (2, "#### 18")):
        tally.add(answered(text, "strict", epoch))
    assert tally.summary()["epochs"]["majority"]["correct"] == 1
    late = ConditionTally("strict")
    for epoch, text in ((10, "#### 7"), (11, "#### 7"), (2, "#### 18"), (3, "#### 18")):
        late.add(answered(text, "strict", epoch))
    assert late.summary()["epochs"]["majority"]["correct"] == 1


@pytest.mark.parametrize(
    ("rule", "texts"),
    [
        ("normalized", ["#### 7", "#### 7", "#### 18", "#### 18.00", "#### 18.0"]),
        ("strict", ["#### 7", "#### 7", "#### 18", "#### 18.", "#### 18"]),
        ("flexible", ["It is 7", "It is 7", "It is 18", "It is $18", "It is 18."]),
    ],
)
def test_the_majority_is_of_values_and_not_of_how_they_are_written(rule: Rule, texts: list[str]) -> None:
    tally = ConditionTally(rule)
    for epoch, text in enumerate(texts, 1):
        tally.add(answered(text, rule, epoch))
    assert tally.summary()["epochs"]["majority"]["correct"] == 1
