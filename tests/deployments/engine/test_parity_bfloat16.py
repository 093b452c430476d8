"""In bfloat16 the engine strays from exact values no further than a plain forward does.

Batches of other shapes round in other ways, so greedy texts part: both are measured over the engine's own text, by
how far they are from float32 with the same weights (root mean square over all tokens). The engine may be 1.5 times
as far as the plain forward, and 2**-10 of the values, for each point and for the logprobs.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from by_hand import hooked
from by_hand import point as point_of

from deployments.engine.edits import Edit, Tokens
from deployments.engine.engine import Engine
from deployments.engine.request import Delta
from deployments.model.model import Model
from deployments.points.patterns import Patterns
from tests.deployments.conftest import DEVICE, SERVED

RATIO, FLOOR = 1.5, 2**-10
LENGTHS = (1, 13, 40, 6, 21)
NEW = 7
# Those whose layers differ in what they round; test_parity has all in float32.
DIFFERENT = ("qwen3", "qwen3_moe", "gpt2", "gpt_neox", "gemma2", "opt", "deepseek_v3", "llama4", "gemma4_shared")
ARCHITECTURES = [name if name in DIFFERENT else pytest.param(name, marks=pytest.mark.long) for name in SERVED]

pytestmark = pytest.mark.slow


def assert_no_further(got, plain, exact, name):
    """Lists of values, each [tokens, ...], or of attention patterns."""
    got, plain, exact = (
        torch.cat([one.values if isinstance(one, Patterns) else one for one in values]).double().flatten()
        for values in (got, plain, exact)
    )
    most = RATIO * (plain - exact).norm() + FLOOR * exact.norm()
    assert (got - exact).norm() <= most, f"{name}: {(got - exact).norm() / exact.norm():.2%} of its norm"


@torch.inference_mode()
def own_logprobs(model, end):
    """[tokens] of the tokens that a request got, in one plain forward."""
    ids = torch.tensor([[*end.prompt, *end.tokens]], device=DEVICE)
    logits = model.hf(input_ids=ids, use_cache=False).logits[0]
    logprobs = logits[len(end.prompt) - 1 : -1].float().log_softmax(-1).cpu()
    return logprobs.gather(-1, torch.tensor(end.tokens)[:, None]).squeeze(-1)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(
    "attention",
    [pytest.param({}, id="auto"), pytest.param({"attn_implementation": "eager"}, id="eager", marks=pytest.mark.long)],
)
def test_values_and_logprobs_stray_no_further_than_a_plain_forwards(
    architecture, attention, build, tiny, byte_tokenizer, prompt, capturing, drain, endings, lone_values
):
    # All experts take part: which of two all but equal ones is taken hangs on the rounding.
    with_experts = architecture in ("qwen3_moe", "deepseek_v3", "llama4")
    settings = {"num_experts_per_tok": 4, **attention} if with_experts else attention
    rounded, exact = build(architecture, torch.bfloat16, **settings), build(architecture, **settings)
    exact.load_state_dict(rounded.state_dict())
    model, twin = Model(rounded, byte_tokenizer, "bfloat16"), SimpleNamespace(hf=exact)
    points = tuple(model.points)
    assert [point.name for point in points] == [point.name for point in tiny(architecture, **settings).points]

    engine = Engine(model, max_running=3, prefill_tokens=16)  # fewer than there are, and some prompts in chunks
    for length in LENGTHS:
        request = capturing(model, str(length), prompt(length), NEW, points=[point.name for point in points])
        engine.submit(replace(request, ignore_eos=True, logprobs=0))
    events = drain(engine)
    ends = endings(events)

    said = {
        id: torch.tensor([one.logprob for e in events if isinstance(e, Delta) and e.id == id for one in e.logprobs])
        for id in ends
    }
    assert_no_further(
        [said[id] for id in ends],
        [own_logprobs(model, end) for end in ends.values()],
        [own_logprobs(twin, end) for end in ends.values()],
        "logprobs",
    )
    plain, want = (
        [lone_values(of, [*end.prompt, *end.tokens], points) for end in ends.values()] for of in (model, twin)
    )
    for name in (point.name for point in points):
        got = [end.captured.values[name] for end in ends.values()]
        assert_no_further(got, [values[name] for values in plain], [values[name] for values in want], name)


@pytest.mark.parametrize("name", ["qwen3", "gpt2", "opt", "gemma2", "falcon_parallel"])
def test_edited_values_stray_no_further_than_those_edited_by_hand(name, build, byte_tokenizer, prompt, capturing):
    rounded, exact = build(name, torch.bfloat16), build(name)
    exact.load_state_dict(rounded.state_dict())
    model, twin = Model(rounded, byte_tokenizer, "bfloat16"), SimpleNamespace(hf=exact)
    hidden, attention = point_of(model, "layers.0.output"), point_of(model, "layers.1.attention.output")
    numbers = torch.Generator().manual_seed(0)
    direction = torch.randn(hidden.shape, generator=numbers).to(DEVICE)
    rows = torch.randn(13, *hidden.shape, generator=numbers).to(DEVICE)
    edits = [
        Edit(hidden, "add", vector=direction),
        Edit(attention, "project_out", vector=direction),
        Edit(hidden, "scale", Tokens(13), low=1.7),
        Edit(hidden, "clamp", low=-0.3, high=0.5, features=(1, 4, 6)),
        Edit(hidden, "replace", Tokens(0, 13), vector=rows.bfloat16()),
    ]
    names = [hidden.name, attention.name, "lm_head.output"]
    sent = [
        replace(capturing(model, str(i), prompt(13, i), NEW, points=names), edits=(edit,), ignore_eos=True)
        for i, edit in enumerate(edits)
    ]
    got, plain, want = ([[] for _ in names] for _ in range(3))
    for request, end in zip(sent, Engine(model, prefill_tokens=16).generate(sent), strict=True):
        watched = [*request.edits, *(Edit(point_of(model, name), "scale", low=1.0) for name in names)]
        tokens = [*end.prompt, *end.tokens]
        by_hand, exactly = hooked(model, tokens, watched)[1], hooked(twin, tokens, watched)[1]
        for i, name in enumerate(names):
            got[i].append(end.captured.values[name])
            plain[i].append(by_hand[name])
            want[i].append(exactly[name])
    for i, name in enumerate(names):
        assert_no_further(got[i], plain[i], want[i], name)
