import asyncio
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from fake_openai import FakeServer

from deployments.demo_model import INSTRUCTION
from evals.config import Config, EvalError, Mode
from evals.gsm8k.options import parse_args
from evals.gsm8k.preparation import check
from evals.server.client import PRESET, ChatClient
from evals.task import steering
from evals.task.prompts import Example, Prompts
from evals.task.records import agent_state, trajectory
from evals.task.trajectory import Problem, Sample, run_problem


def play(server: FakeServer, label: str, mode: Mode, *options: str, few_shot: Sequence[Example] = ()) -> Sample:
    config = parse_args(["--base-url", server.base_url, "--model", "fake/model", *options])

    async def talk(config: Config) -> Sample:
        client = ChatClient(config.base_url, timeout=30, retries=0, parallel=1)
        try:
            problem = Problem("abc", f"{label} What is 2 + 3?", "5")
            prompts = Prompts({"control": ""}, few_shot)
            return await run_problem(client.chat, problem, mode, "control", config, prompts)
        finally:
            await client.close()

    return asyncio.run(talk(config))


def test_without_tools_it_is_one_turn_of_the_question_and_the_instruction(server: FakeServer) -> None:
    sample = play(server, "", "no-tools")
    (body,) = server.requests
    assert body["messages"] == [{"role": "user", "content": " What is 2 + 3?" + INSTRUCTION}]
    assert not {"tools", "capture", "store_activations", "session_id"} & body.keys()
    assert (sample.correct, sample.strict, len(sample.turns)) == (True, "5", 1)


def test_with_tools_results_go_back_under_their_calls_id(server: FakeServer) -> None:
    sample = play(server, "", "with-tools")
    roles = [message["role"] for message in sample.messages]
    assert roles == ["user", "assistant", "tool", "assistant"]
    assert sample.messages[2] == {"role": "tool", "tool_call_id": "call-1", "content": "5"}
    assert sample.correct
    assert server.requests[0]["tools"][0]["function"]["name"] == "calculator"
    # The server refuses fields it does not know, so what it added to its message does not come back to it.
    assert server.requests[1]["messages"][1].keys() == {"role", "content", "tool_calls"}


def test_drawn_answers_repeat_by_seed_and_greedy_ones_ask_for_none(server: FakeServer) -> None:
    for options in ([], ["--temperature", "1"], ["--temperature", "1"], ["--temperature", "1", "--seed", "7"]):
        play(server, "", "with-tools", *options)
    seeds = [body.get("seed") for body in server.requests]
    assert seeds[:2] == [None, None]
    assert seeds[2:4] == seeds[4:6]
    assert len({None, *seeds}) == 5  # each turn's and each run's seed is its own


def test_half_an_emoji_of_the_model_is_kept_from_text_and_tools(server: FakeServer) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "calculator", "arguments": '{"expression": "\\ud83d"}'}}
    said = [{"content": "half \ud83d", "tool_calls": [call]}, {"content": "#### 5"}]

    async def chat(body: dict[str, Any]) -> dict[str, Any]:
        reason = "tool_calls" if len(said) == 2 else "stop"
        return {"choices": [{"message": said.pop(0), "finish_reason": reason}], "usage": {"prompt_tokens": None}}

    config = parse_args(["--model", "fake/model"])
    prompts = Prompts({"control": ""})
    sample = asyncio.run(run_problem(chat, Problem("abc", "2 + 3?", "5"), "with-tools", "control", config, prompts))
    assert (sample.outcome, sample.prompt_tokens) == ("correct", 0)
    assert sample.messages[1]["content"] == "half ?"
    assert sample.messages[2]["content"].startswith("error: ")
    assert Sample.model_validate_json(sample.model_dump_json()) == sample


def test_worked_examples_are_no_answer_of_the_model(server: FakeServer) -> None:
    shown = [Example("e", "What is 2 + 3?", "#### 5")]
    sample = play(server, "[wide]", "no-tools", few_shot=shown)
    assert (sample.outcome, sample.completion) == ("truncated", "")


@pytest.mark.parametrize(
    ("rule", "outcome"), [("strict", "invalid"), ("flexible", "correct"), ("normalized", "invalid")]
)
def test_the_rule_decides_what_is_correct(
    server: FakeServer, further: Callable[..., list[str]], rule: str, outcome: str
) -> None:
    sample = play(server, "[invalid]", "no-tools", *further(rule=rule))
    assert (sample.outcome, sample.correct) == (outcome, outcome == "correct")
    assert (sample.correct_strict, sample.correct_flexible, sample.correct_normalized) == (False, True, False)
    assert (sample.strict, sample.flexible, sample.normalized) == (None, "5", None)


def test_what_is_wrong_with_a_call_goes_back_to_the_model(server: FakeServer) -> None:
    sample = play(server, "[zero]", "with-tools")
    assert server.requests[1]["messages"][2]["content"] == "error: division by zero"
    assert sample.correct
    assert [step.get("error") for step in trajectory(sample)] == [None, None, True, None]
    (call,) = agent_state(sample)["tool_calls"]
    assert (call["name"], call["error"], call["result"]) == ("calculator", True, "error: division by zero")


def test_capture_names_the_sample_the_turn_and_the_points(server: FakeServer) -> None:
    def captured(mode: Mode, *options: str) -> list[dict[str, Any]]:
        server.requests.clear()
        play(server, "", mode, "--collect-activations", *options)
        assert all(b["session_id"].startswith("gsm8k-") and b["store_activations"] is True for b in server.requests)
        return [body["capture"] for body in server.requests]

    tags = {"mode": "with-tools", "variant": "control", "eval": "gsm8k", "turn": "0"}
    assert captured("with-tools") == [
        {"sample_id": "abc", "tags": tags, "store_text": True},
        {"sample_id": "abc", "tags": tags | {"turn": "1"}, "store_text": True},
    ]
    asked = {"layers": [1, 2], "sites": ["mlp.output"], "tokens": {"last": 3}}
    (capture,) = captured("no-tools", "--capture", json.dumps(asked))
    assert capture | asked == capture


def talk(said: list[dict[str, Any]], *options: str, mode: Mode = "with-tools") -> tuple[Sample, list[dict[str, Any]]]:
    """A sample whose answers are given, and the bodies that were sent."""
    bodies: list[dict[str, Any]] = []

    async def chat(body: dict[str, Any]) -> dict[str, Any]:
        bodies.append(json.loads(json.dumps(body)))
        message = said.pop(0)
        reason = "tool_calls" if message.get("tool_calls") else "stop"
        usage = {"prompt_tokens": 3, "completion_tokens": 9, "completion_tokens_details": {"reasoning_tokens": 4}}
        return {"choices": [{"message": message, "finish_reason": reason}], "usage": usage, PRESET: "calm"}

    config = parse_args(["--model", "fake/model", *options])
    prompts = Prompts({"control": ""}, system=config.system)
    problem = Problem("abc", "2 + 3?", "5")
    return asyncio.run(run_problem(chat, problem, mode, steering.asked(config)[-1], config, prompts)), bodies


def test_thoughts_are_kept_counted_and_go_back_in_a_tool_loop() -> None:
    function = {"name": "calculator", "arguments": '{"expression": "2 + 3"}'}
    call = {"id": "1", "type": "function", "function": function}
    said = [{"content": None, "reasoning_content": "I add.", "tool_calls": [call]}, {"content": "#### 5"}]
    sample, bodies = talk(said)
    assert bodies[1]["messages"][1]["reasoning_content"] == "I add."
    assert (sample.reasoning, [turn.reasoning_tokens for turn in sample.turns]) == ("I add.", [4, 4])
    assert trajectory(sample)[1]["reasoning_content"] == "I add."
    assert [turn.preset for turn in sample.turns] == ["calm", "calm"]


def test_a_sweep_steers_each_layer_with_each_scale(tmp_path: Path) -> None:
    file = tmp_path / "calm.yaml"
    file.write_text("[{op: add, point: 'layers.{layer}.output', vector: 'calm-{layer}', scale: 1}]")
    told = ["--interventions", str(file), "--sweep", "scale=-4,0,4.5", "layer=8,12"]
    config = parse_args(["--model", "fake/model", *told])
    names = [f"control_layer{layer}_scale{scale}" for layer in (8, 12) for scale in ("-4", "4p5")]
    assert steering.asked(config) == ("control", *names)
    beside = parse_args(["--model", "fake/model", *told, "--variants", "control,calm"])
    assert len(steering.asked(beside)) == 2 + 2 * 4
    sample, (body,) = talk([{"content": "#### 5"}], *told, mode="no-tools")
    expected = {"op": "add", "point": "layers.12.output", "vector": "calm-12", "scale": 4.5}
    assert (sample.variant, body["interventions"]) == (names[-1], [expected])


ADD = {"op": "add", "point": "layers.{layer}.output", "vector": "calm", "scale": 3.0}
OUT = {"op": "project_out", "point": "layers.{layer}.output", "vector": "calm"}
DAMP = {"op": "scale", "point": "layers.{layer}.output", "factor": 0.5}


def steered(tmp_path: Path, interventions: list[dict[str, Any]], *options: str) -> list[str]:
    file = tmp_path / "calm.json"
    file.write_text(json.dumps(interventions))
    return ["--interventions", str(file), *options]


def test_interventions_are_asked_with_where_no_scale_is_swept(tmp_path: Path) -> None:
    told = steered(tmp_path, [ADD], "--sweep", "layer=8,12")
    sample, (body,) = talk([{"content": "#### 5"}], *told, mode="no-tools")
    assert (sample.variant, body["interventions"]) == ("control_layer12", [ADD | {"point": "layers.12.output"}])
    told = steered(tmp_path, [one := ADD | {"point": "layers.8.output"}])
    sample, (body,) = talk([{"content": "#### 5"}], *told, mode="no-tools")
    assert (sample.variant, body["interventions"]) == ("control_steered", [one])


@pytest.mark.parametrize("interventions", [[DAMP], [ADD, OUT]])
def test_a_scale_of_0_is_asked_where_it_is_not_the_same_as_no_steering(
    tmp_path: Path, interventions: list[dict[str, Any]]
) -> None:
    told = steered(tmp_path, interventions, "--sweep", "scale=2,0", "layer=8")
    sample, (body,) = talk([{"content": "#### 5"}], *told, mode="no-tools")
    assert sample.variant == "control_layer8_scale0"
    field = "factor" if interventions == [DAMP] else "scale"
    point = {"point": "layers.8.output"}
    assert body["interventions"] == [
        interventions[0] | point | {field: 0.0},
        *(one | point for one in interventions[1:]),
    ]


def test_scales_are_refused_where_no_intervention_has_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_args(["--model", "fake/model", *steered(tmp_path, [OUT], "--sweep", "scale=1,2", "layer=8")])
    assert "no intervention of --interventions has a scale" in capsys.readouterr().err


def test_conditions_of_one_name_are_refused(tmp_path: Path) -> None:
    told = steered(tmp_path, [ADD | {"point": "layers.8.output"}], "--sweep")
    (tmp_path / "both.yaml").write_text("{control: '', control_scale1: Hurry!}")
    for more in (["scale=1", "--variants", str(tmp_path / "both.yaml")], ["scale=1.0000001,1.0000002"]):
        config = parse_args(["--model", "fake/model", *told, *more])
        with pytest.raises(EvalError, match="two conditions would be named control_scale1"):
            check(config, {"model": {}, "server": {"versions": None}}, [])
