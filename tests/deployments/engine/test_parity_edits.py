"""On every architecture each edit equals the same edit by a plain hook and by nnsight, in prompts and decodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from itertools import count
from typing import NamedTuple
from zlib import crc32

import pytest
import torch
from by_hand import hooked, traced
from by_hand import point as point_of
from hypothesis import Phase, given, seed, settings
from hypothesis import strategies as st

from deployments.engine.edits import Edit, Tokens
from deployments.engine.engine import Engine
from deployments.places.hook_site import Point
from tests.deployments.conftest import DEVICE, HYBRID, SERVED

OPERATIONS = ("add", "scale", "zero", "project_out", "clamp", "replace", "replace by rows")
CANONICAL = ("embed.", "layers.", "norm.", "lm_head.")
NEW = 5
EXAMPLES = settings().max_examples // 10  # batches at random for each architecture, each its own

pytestmark = [pytest.mark.slow, pytest.mark.parametrize("architecture", [*SERVED, *HYBRID], scope="module")]


class Asked(NamedTuple):
    """An edit of the point with this number, counted round and round, among those with canonical names or all."""

    op: str
    at: int
    canonical: bool
    tokens: str
    part: str  # all of a row, some of its features, or some heads where it has any
    scale: float  # the factor, how much is added, or where is clamped
    seed: int

    def edit(self, points: Sequence[Point], prompt: int) -> Edit:
        """The edit of a request whose prompt has so many tokens."""
        named = [at for at in points if at.name.startswith(CANONICAL)] if self.canonical else points
        at, numbers = named[self.at % len(named)], torch.Generator().manual_seed(self.seed)
        tokens = {
            "all": Tokens(),
            "prompt": Tokens(0, prompt),
            "generated": Tokens(prompt),
            "last": Tokens(prompt - 1, prompt),
            "few": Tokens(few=(1, prompt, prompt + 2)),
        }[self.tokens]
        *count, width = at.shape
        heads = (count[0] - 1, 0) if self.part == "heads" and count and count[0] > 1 else None
        features = tuple(range(0, width, 2)) if self.part == "features" else None
        shape = (*([len(heads)] if heads else count), len(features) if features else width)
        if self.op == "replace by rows":
            shape = (len(tokens.within(0, prompt + NEW)), *shape)
        elif self.seed % 2:
            shape = shape[-1:]  # one vector for all heads
        drawn = torch.randn(shape, generator=numbers).to(DEVICE)
        part = {"tokens": tokens, "features": features, "heads": heads}
        match self.op:
            case "scale" | "zero":
                return Edit(at, "scale", low=self.scale if self.op == "scale" else 0.0, **part)
            case "clamp":
                return Edit(at, "clamp", low=-abs(self.scale) / 4, high=abs(self.scale) / 8, **part)
            case "add":
                return Edit(at, "add", vector=self.scale * drawn, **part)
        return Edit(at, "replace" if "replace" in self.op else "project_out", vector=drawn, **part)


def asked(op):
    return st.builds(
        Asked,
        op=op,
        at=st.integers(0, 10_000),
        canonical=st.booleans(),
        tokens=st.sampled_from(["all", "prompt", "generated", "last", "few"]),
        part=st.sampled_from(["all", "all", "features", "heads"]),
        scale=st.floats(-3, 3, allow_nan=False),
        seed=st.integers(0, 10_000),
    )


more = st.lists(asked(st.sampled_from(OPERATIONS)), max_size=2)
batches = st.tuples(*(st.tuples(asked(st.just(op)), more) for op in OPERATIONS))


@pytest.fixture(scope="module")
def points(architecture, tiny):
    """Every point of the model that an edit may have, in the order in which a forward reaches them."""
    found = [*tiny(architecture).points, *tiny(architecture).points.more()]
    vectors = [at for at in found if at.place.dtype.is_floating_point and not at.place.grows]
    return [at for at in vectors if not at.place.stream]  # no module has it: test_residual_stream.py


def test_each_operation_anywhere_is_the_same_edit_by_hand_and_by_nnsight(
    architecture, points, tiny, prompt, capturing, assert_rows_close
):
    model = tiny(architecture)
    head = Edit(point_of(model, "lm_head.output"), "scale", low=1.0)  # changes nothing: to have its values

    def requests(batch):
        for i, (first, others) in enumerate(batch):
            ids = prompt(3 + i, i)
            edits = tuple(one.edit(points, len(ids)) for one in (first, *others))
            names = list(dict.fromkeys([*(edit.point.name for edit in edits), "lm_head.output"]))
            yield replace(capturing(model, str(i), ids, NEW, points=names), edits=edits, ignore_eos=True)

    batches_run = count(crc32(architecture.encode()))  # so that nnsight runs other operations for each architecture

    @seed(crc32(architecture.encode()))
    @settings(max_examples=EXAMPLES, database=None, phases=[Phase.generate])
    @given(batches)
    def holds(batch):
        sent = list(requests(batch))
        done = Engine(model, max_running=5, prefill_tokens=16).generate(sent)
        by_nnsight = next(batches_run) % len(OPERATIONS) if find_spec("nnsight") else None
        for i, (request, end) in enumerate(zip(sent, done, strict=True)):
            tokens, edits = [*request.prompt, *end.tokens], [*request.edits, head]
            at_modules = all(edit.point.place.side in ("input", "output") for edit in edits)
            for run in (hooked, traced) if i == by_nnsight and at_modules else (hooked,):
                logits, values = run(model, tokens, edits)
                for name, want in values.items():
                    assert_rows_close(end.captured.values[name], want, f"{run.__name__} {name}: {edits}", 1e-3)
                for row, token in zip(logits[len(request.prompt) - 1 :], end.tokens, strict=False):
                    assert row[token] >= row.max() - 1e-3

    holds()
