"""A model that must call the calculator solves as many problems as one that may."""

from __future__ import annotations

import json

import pytest

from deployments.chat.template import ChatFormat, ResponseFormats
from deployments.demo_model import INSTRUCTION, PROBLEMS
from deployments.demo_model.calculator import TOOL, answer_call
from deployments.engine.engine import Engine
from deployments.engine.request import Request
from deployments.job import Job
from deployments.messages import whole_calls


def solved(demo, rows, *, forced):
    """How many problems get the right answer; forced, one call is made for each step of the solution."""
    chat, engine = ChatFormat(demo.tokenizer, demo.hf), Engine(demo)
    formats = ResponseFormats(chat, demo)
    talks = [[{"role": "user", "content": row["question"] + INSTRUCTION}] for row in rows]
    going, right = list(range(len(rows))), 0
    for turn in range(8):
        prompts, requests = {}, []
        for i in going:
            must_call = ("calculator",) if forced and turn < rows[i]["answer"].count("<<") else ()
            job = Job(str(i), messages=talks[i], tools=[TOOL], must_call=must_call, parallel_calls=False)
            prompts[i] = chat.render(job.messages, job.tools)
            tokens, grammar = chat.tokenize(prompts[i]), formats.grammar(job, prompts[i])
            requests.append(Request(job.id, tokens, 200, grammar=grammar, markers=chat.markers([TOOL])))
        for i, finished in zip(list(going), engine.generate(requests), strict=True):
            reader = chat.reader(prompts[i], [TOOL], parallel=False)
            written = [reader.add(finished.rest.text), reader.close()]
            text = "".join(part.content for part in written)
            calls = whole_calls(part for one in written for part in one.tool_calls)
            if not calls:
                going.remove(i)
                right += text.split("####")[-1].strip() == rows[i]["answer"].split("####")[-1].strip()
                continue
            (call,) = calls
            function = {"name": call.name, "arguments": call.arguments}
            called = {"id": f"{turn}", "type": "function", "function": function}
            talks[i] += [
                {"role": "assistant", "content": text, "tool_calls": [called]},
                {"role": "tool", "tool_call_id": f"{turn}", "content": answer_call(call.name, call.arguments)},
            ]
    return right


@pytest.mark.slow
def test_forced_calls_solve_as_many_problems_as_free_ones(demo):
    rows = [json.loads(line) for line in PROBLEMS.read_text().splitlines()[:30]]
    free = solved(demo, rows, forced=False)
    assert free > 0
    assert solved(demo, rows, forced=True) >= free
