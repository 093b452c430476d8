import pytest
from hypothesis import given
from hypothesis import strategies as st

from evals.config import EvalError
from evals.scoring import Rule
from evals.task.rewards import SHIPPED, load_rewards
from evals.task.trajectory import Problem, Sample, Turn, scored


def rewarded(sample: Sample, **weights: float) -> Sample:
    return load_rewards(weights)(sample)


def sample(text: str, tokens: int = 10, calls: tuple[str, ...] = (), rule: Rule = "strict") -> Sample:
    """A sample whose last answer is `text`, after a turn of calls with these results."""
    turn = Turn(finish_reason="stop", prompt_tokens=1, completion_tokens=tokens, latency_s=0.1, activations=None)
    problem = Problem("abc", "q", "5")
    messages: list[dict[str, object]] = [{"role": "user", "content": "q"}]
    if calls:
        function = {"name": "calculator", "arguments": "{}"}
        made = [{"id": str(i), "type": "function", "function": function} for i in range(len(calls))]
        messages.append({"role": "assistant", "content": None, "tool_calls": made})
        messages += [{"role": "tool", "tool_call_id": str(i), "content": call} for i, call in enumerate(calls)]
    messages.append({"role": "assistant", "content": text})
    turns = [turn.model_copy(update={"completion_tokens": 0}), turn] if calls else [turn]
    return scored(
        Sample(
            **problem._asdict(),
            mode="with-tools",
            variant="control",
            finish_reason="stop",
            started=0.0,
            ended=1.0,
            latency_s=1.0,
            turns=turns,
            messages=messages,
        ),
        rule,
    )


def shouting(sample: Sample) -> float:
    """A user's own."""
    return float("!" in str(sample.completion))


def too_much(sample: Sample) -> float:
    return 2.0


def broken(sample: Sample) -> float:
    return float(1 / 0)


@pytest.mark.parametrize(
    ("name", "given", "value"),
    [
        ("correctness", sample("#### 5"), 1.0),
        ("correctness", sample("#### 6"), 0.0),
        ("correctness", sample("#### **5**"), 0.0),
        ("correctness", sample("#### **5**", rule="normalized"), 1.0),
        ("efficiency", sample("It is 5", tokens=256, rule="flexible"), 0.5),
        ("format", sample("so\n#### 6\n"), 1.0),
        ("format", sample("#### 5 ducks"), 0.0),
        ("format", sample("#### 4\n#### 5"), 0.0),
        ("format", sample("5"), 0.0),
        ("efficiency", sample("#### 5", tokens=1), 2 ** (-1 / 256)),
        ("efficiency", sample("#### 5", tokens=256), 0.5),
        ("efficiency", sample("#### 5", tokens=512), 0.25),
        ("efficiency", sample("#### 6", tokens=1), 0.0),
        ("efficiency", sample("#### 6", tokens=0), 0.0),
        ("tool_use", sample("#### 5"), 0.0),
        ("tool_use", sample("#### 5", calls=("5",)), 1.0),
        ("tool_use", sample("#### 5", calls=("5", "error: division by zero")), 0.5),
    ],
)
def test_each_reward_is_what_its_name_says(name: str, given: Sample, value: float) -> None:
    assert SHIPPED[name](given) == value


@given(st.text(), st.integers(1, 100_000), st.lists(st.text()))
def test_every_reward_is_from_0_to_1(text: str, tokens: int, calls: list[str]) -> None:
    got = rewarded(sample(text, tokens, tuple(calls)), **dict.fromkeys(SHIPPED, 1.0))
    assert set(got.rewards) == set(SHIPPED)
    assert all(0 <= value <= 1 for value in got.rewards.values())


def test_the_reward_is_the_weighted_sum() -> None:
    got = rewarded(sample("#### 5", tokens=256), correctness=1.0, efficiency=0.5, tool_use=3.0)
    assert (got.rewards, got.reward) == ({"correctness": 1.0, "efficiency": 0.5, "tool_use": 0.0}, 1.25)


def test_a_function_of_ones_own_is_named_by_its_import_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(__file__.rpartition("/")[0])
    for name in ("test_rewards:shouting", "test_rewards.shouting"):
        assert rewarded(sample("5!"), **{name: 2.0}).reward == 2.0


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("kindness", "none of correctness, format, efficiency, tool_use, nor can it be imported"),
        ("absent_module:f", "absent_module:f is none of .* nor can it be imported"),
        ("math:absent", "math:absent is none of .* nor can it be imported"),
        ("math:pi", "math:pi is not a function"),
    ],
)
def test_a_reward_that_is_not_there_is_refused_by_name(name: str, says: str) -> None:
    with pytest.raises(EvalError, match=says):
        load_rewards({name: 1.0})


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("test_rewards:too_much", "ValueError: 2.0 is not from 0 to 1"),
        ("test_rewards:broken", "ZeroDivisionError: "),
        ("efficiency", "ValueError: the server's answers have no usage.completion_tokens"),
    ],
)
def test_a_reward_that_fails_says_for_which_sample_and_why(
    monkeypatch: pytest.MonkeyPatch, name: str, why: str
) -> None:
    monkeypatch.syspath_prepend(__file__.rpartition("/")[0])
    with pytest.raises(EvalError, match=f"the reward {name} failed for abc.with-tools.control: {why}"):
        rewarded(sample("#### 5", tokens=0), **{name: 1.0})


def test_a_failed_sample_has_no_reward() -> None:
    failed = sample("5").model_copy(update={"outcome": "failed"})
    assert rewarded(failed, correctness=1.0).reward is None
