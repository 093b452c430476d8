"""Tokens chosen by what they are, which is known one by one: recorded, read and changed, and no others."""

from __future__ import annotations

import pytest
import torch
from pydantic import TypeAdapter
from safetensors.torch import save

from deployments.engine.engine import Engine
from deployments.engine.request import Request
from deployments.interventions.resolve import EditResolver
from deployments.interventions.stored_tensors import FetchedTensors
from deployments.points.capture import Capture
from deployments.points.interventions import Interventions
from deployments.points.placement import AnswerReasoning, Layout, Turns
from deployments.points.token_choices import REASONING, TEMPLATE
from deployments.readouts.files import define
from deployments.readouts.resolver import ReadoutResolver
from deployments.readouts.spec import AskedReadout
from deployments.readouts.values import Readout

PROMPT, NEW, POINT = [5, 9, 17, 33, 65, 129], 24, "layers.0.output"


def by_parity():
    """Follows an answer in which the tokens of even ids are the reasoning."""
    return AnswerReasoning(lambda token: token % 2 == 0, len(PROMPT))


@pytest.mark.parametrize("fixed", [False, True])
def test_a_part_of_an_answer_is_recorded_read_and_changed_and_no_other(tiny, fixed):
    model = tiny("qwen3")
    hidden, most = model.points.named(POINT, "")[0].shape[-1], len(PROMPT) + NEW
    turns = Turns([REASONING, REASONING, *[TEMPLATE] * 4], [0, 0, -1, -1, -1, -1], ("assistant", "user", "assistant"))
    asked = [AskedReadout(name="sum", tokens="answer")]
    spec = {"name": "sum", "model": "m", "point": POINT, "kind": "linear"}
    readout = Readout(define(save({"weight": torch.ones(1, hidden), "bias": torch.zeros(1)}), spec), model.device)
    used = ReadoutResolver.of(model.points, {"sum": readout}, asked)
    changes = TypeAdapter(Interventions).validate_python([{"point": POINT, "op": "zero", "tokens": "reasoning"}])
    resolver = EditResolver(model.points, model.device, {"a": changes[0]}, FetchedTensors({}, {}), used, report=True)

    def request(id, tokens):
        layout = Layout(lambda: ("", []), len(PROMPT), True, lambda: turns, by_parity)
        capture = Capture.model_validate({"points": [POINT], "tokens": tokens}).placed(layout)
        values, edits = used.values(len(PROMPT), most, layout), resolver.of(["a"], len(PROMPT), most, layout)
        points = model.points.resolve(capture)
        return Request(
            id, PROMPT, NEW, ignore_eos=True, capture=capture, points=points, readouts=values, edits=edits,
            parts=layout.parts,
        )  # fmt: skip

    requests = [request(tokens, tokens) for tokens in ("reasoning", "answer", "all")]
    engine = Engine(model, fixed_memory=fixed, capture_thread=fixed, capture_bytes=16 << 10)  # rows go out by a few
    done = engine.generate(requests)
    tokens = [*done[0].prompt, *done[0].tokens]
    generated = range(len(PROMPT), most)
    even = [0, 1, *(i for i in generated if tokens[i] % 2 == 0)]
    odd = [i for i in generated if tokens[i] % 2]
    assert len(even) > 4
    assert odd
    rows = [one.captured.values[POINT] for one in done]
    assert [[*one.captured.positions] for one in done] == [even, odd, [*range(most)]]
    assert not rows[0].any()
    assert (rows[2] != 0).any(1).nonzero().flatten().tolist() == [i for i in range(most) if i not in even]
    assert torch.equal(rows[1], rows[2][odd])
    for one in done:
        assert [len(PROMPT) * part.generated + i for part in one.readouts for i in part.index] == odd
    assert [edit.report.summary[0] for edit in requests[0].edits] == [len(even)]
