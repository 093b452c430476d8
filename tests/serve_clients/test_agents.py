"""OpenAI's agents SDK, by its default API: a run with a function tool, whole and streamed."""

from __future__ import annotations

import json

import pytest

from tests.serve_clients.test_openai_sdk import MODEL, QUESTIONS

SCRIPT = f"""
import asyncio
import json

from agents import Agent, ModelSettings, Runner, function_tool, set_tracing_disabled

set_tracing_disabled(True)
called = []


@function_tool
def calculator(expression: str) -> str:
    "Evaluates an arithmetic expression."
    called.append(expression)
    return "40"


# The SDK takes tool_choice back after the first call.
settings = ModelSettings(temperature=0, max_tokens=96, tool_choice="required", top_logprobs=1)
agent = Agent(name="pens", instructions="Be brief.", tools=[calculator], model={MODEL!r}, model_settings=settings)


async def main():
    whole = await Runner.run(agent, {QUESTIONS[0]!r}, max_turns=6)
    first, called[:] = list(called), []
    streamed = Runner.run_streamed(agent, {QUESTIONS[0]!r}, max_turns=6)
    kinds = [event.data.type async for event in streamed.stream_events() if event.type == "raw_response_event"]
    further = await Runner.run(agent, "And now?", previous_response_id=whole.last_response_id, max_turns=6)
    finals = [run.final_output for run in (whole, streamed, further)]
    print(json.dumps([first, called[: len(first)], finals, kinds]))


asyncio.run(main())
"""


@pytest.mark.long  # in the environment of the clients
def test_an_agent_calls_its_tool_and_answers(interpreter, tmp_path):
    (tmp_path / "agent.py").write_text(SCRIPT)
    stdout, stderr = interpreter.run(tmp_path / "agent.py")
    assert "Traceback" not in stderr, stderr
    called, again, (whole, streamed, further), kinds = json.loads(stdout.splitlines()[-1])
    assert called
    assert called == again
    assert whole == streamed
    assert further
    assert {"response.function_call_arguments.delta", "response.output_text.delta"} <= set(kinds)
