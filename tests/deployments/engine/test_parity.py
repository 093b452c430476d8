"""On every architecture, for any order of arrivals and ends, a request gets the same result as alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple
from zlib import crc32

import pytest
import torch
from hypothesis import Phase, given, seed, settings
from hypothesis import strategies as st

from deployments.engine import kv_memory, sequence
from deployments.engine.engine import Engine
from deployments.engine.kv_memory import KvMemory
from deployments.engine.request import Event, Finished, LensLayers, Request, Rows, Sampling
from tests.deployments.conftest import HYBRID, SERVED

LENGTHS = (1, 2, 5, 7, 9, 14, 21, 30)
NEW = 8  # a request's most tokens
EXAMPLES = settings().max_examples // 10  # schedules at random for each architecture, each its own
ENDLESS = 3000  # steps
TOKENS = ["all", "prompt", "generated", "last", {"last": 8}, "prompt_last", "generated_last"]
CANONICAL = ("embed.", "layers.", "norm.", "lm_head.")

# What computes attention: what transformers takes for the architecture, and what shows patterns by itself. Of the
# latter those that differ: windows, capped scores, one matrix for queries, keys and values, one key for all queries.
EAGER = ("qwen3_windows", "gemma2", "gpt2", "falcon_parallel")
ATTENTION = [
    *((name, "auto") for name in (*SERVED, *HYBRID)),
    *(pytest.param(name, "eager", marks=() if name in EAGER else pytest.mark.long) for name in SERVED),
]

pytestmark = [pytest.mark.slow, pytest.mark.parametrize(("architecture", "attention"), ATTENTION, scope="module")]


class Submit(NamedTuple):
    """A request to send."""

    length: int  # its prompt's
    max_tokens: int
    tokens: Any = None  # of which it captures; None captures nothing
    points: str = "canonical"  # or every, few, patterns
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    lens: int | None = None  # of all layers, with so many tokens of each
    # Where in its prompt the rare token stands, as a part of its length; a string is added to that token's logit, for
    # it to be drawn sooner or later.
    breaks: float | str | None = None


class Cancel(NamedTuple):
    which: int


class Step(NamedTuple):
    times: int


class Write(NamedTuple):
    which: int


class Bounds(NamedTuple):
    max_running: int
    prefill_tokens: int
    positions: int  # of KV memory
    capture_bytes: int | None


class Served:
    """An engine, what was sent to it and what came."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.sent: dict[str, Request] = {}
        self.cancelled: set[str] = set()
        self.events: list[Event] = []
        self.stood_still = 0
        self._unwritten: list[tuple[str, int]] = []

    def play(self, schedule: Sequence[Any], make: Callable[[str, Submit], Request]) -> None:
        """Carry out a schedule, then go on to the end, and write what was recorded only where nothing goes without."""
        for action in schedule:
            if isinstance(action, Submit):
                request = self.sent[str(len(self.sent))] = make(str(len(self.sent)), action)
                self.engine.check(request)
                self.engine.submit(request)
            elif isinstance(action, Cancel):  # what was sent, has ended or was never heard of
                self.cancelled.add(str(action.which))
                self.engine.cancel(str(action.which))
            elif isinstance(action, Write):
                self._write(action.which)
            else:
                for _ in range(action.times):
                    self._step()
        for _ in range(ENDLESS):
            if not self._step():
                if self._unwritten:
                    self._write(0)
                elif not self.engine.statistics.running:
                    return
                else:  # rows are on their way
                    self._step(wait=True)
        raise AssertionError("it does not come to an end")

    def _step(self, wait: bool = False) -> bool:
        """One step; whether it was a forward."""
        numbers = self.engine.statistics
        before, new = numbers.steps, self.engine.step(wait)
        assert numbers.kv_bytes <= numbers.kv_budget_bytes
        self.events += new
        self._unwritten += [(e.id, e.captured.bytes) for e in new if isinstance(e, Rows | Finished) and e.captured]
        self.stood_still += numbers.steps == before and numbers.running > 0
        return numbers.steps > before

    def _write(self, which: int) -> None:
        """Say of one chunk of rows that it is written."""
        if self._unwritten:
            self.engine.written(*self._unwritten.pop(which % len(self._unwritten)))


@contextmanager
def breaking(lone: Any, value: float) -> Iterator[None]:
    """While open, the rare token's embedding is not finite."""

    def spoil(_: Any, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        return output.masked_fill((args[0] == lone.rare)[..., None], value)

    hook = lone.model.hf.get_input_embeddings().register_forward_hook(spoil)
    try:
        yield
    finally:
        hook.remove()


@pytest.fixture(scope="module", autouse=True)
def _little_is_reserved():
    """So that requests come to want more than there is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sequence, "RESERVED_TOKENS", 1)
        patch.setattr(kv_memory, "STATES_PART", 1.0)
        yield


@pytest.fixture(scope="module")
def serve(architecture, attention, tiny, prompt, make_lone, capturing):
    """Plays a schedule and checks what each request got: `serve(schedule, bounds, value of the rare token)`."""
    model = tiny(architecture) if attention == "auto" else tiny(architecture, attn_implementation=attention)
    lone = make_lone(model, {length: [3 + token % 190 for token in prompt(length)] for length in LENGTHS}, NEW)
    memory = KvMemory(model, 1, kv_bytes=1)
    outputs = tuple(model.points.named("layers.*.output", ""))
    names = [point.name for point in model.points]
    heads = [point.name for point in model.points.more() if point.name.endswith("heads")]
    points = {
        "every": [*names, *heads],
        "canonical": [*(name for name in names if name.startswith(CANONICAL)), *heads],
        "few": ["layers.1.output", "embed.output"],
    }
    reach = getattr(model.config, "sliding_window", None) or LENGTHS[-1]  # what lies behind a window changes nothing
    patterns = [name for name in points["canonical"] if name.endswith("attention.weights")]
    assert patterns or (attention == "auto" and architecture.startswith("falcon")) or architecture == "mamba2"
    points["patterns"] = patterns or ["layers.2.output"]

    def make(id: str, wanted: Submit) -> Request:
        ids, bias = list(lone.prompts[wanted.length]), {}
        if isinstance(wanted.breaks, float):
            ids[max(int(wanted.breaks * (len(ids) - 1)), len(ids) - reach)] = lone.rare
        elif wanted.breaks:
            bias[lone.rare] = float(wanted.breaks)
        said = {"logprobs": wanted.logprobs, "prompt_logprobs": wanted.prompt_logprobs}
        if wanted.lens:
            said["lens"] = LensLayers(tuple(range(len(outputs))), outputs, wanted.lens)
        request = Request(id, ids, wanted.max_tokens, Sampling(0.0, logit_bias=bias), **said)
        if wanted.tokens is None:
            return request
        asked = capturing(model, id, ids, wanted.max_tokens, points=points[wanted.points], tokens=wanted.tokens)
        return replace(request, capture=asked.capture, points=asked.points)

    def serve(schedule: Sequence[Any], bounds: Bounds, value: float) -> Served:
        max_running, prefill_tokens, positions, capture_bytes = bounds
        engine = Engine(
            model,
            max_running=max_running,
            prefill_tokens=prefill_tokens,
            kv_bytes=positions * memory.position_bytes + max_running * memory.slot_bytes,
            capture_bytes=capture_bytes,
        )
        served = Served(engine)
        with breaking(lone, value):
            served.play(schedule, make)
        for id, request in served.sent.items():
            lone.check(request, [event for event in served.events if event.id == id], id in served.cancelled)
        numbers = engine.statistics
        assert (numbers.running, numbers.waiting, numbers.capture_bytes) == (0, 0, 0)
        return served

    return serve


def test_a_full_house_gets_what_each_gets_alone(serve):
    schedule = [
        Submit(14, NEW, "all", "every", logprobs=3, lens=5),
        Submit(14, NEW, {"last": 8}, prompt_logprobs=2),
        Submit(9, NEW, "generated"),
        Submit(14, NEW, "prompt", logprobs=1),
        Step(7),  # they find no room to grow
        Submit(5, NEW, "all", lens=1, breaks="1000"),
        Submit(30, NEW, "all", "every", prompt_logprobs=1),
        Submit(1, NEW, "last", logprobs=0),
        Submit(21, NEW, "all", breaks=0.2, prompt_logprobs=0),  # in its first chunk; it is not known before its last
        Submit(9, NEW, None, logprobs=5, prompt_logprobs=5, breaks="8"),
        Submit(2, 1, None, logprobs=1),
        Submit(5, 0, "all", prompt_logprobs=0, lens=3),
        Step(6),
        Cancel(5),
        Write(1),
        Submit(1, NEW, None, logprobs=20, breaks=1.0),
        Submit(2, NEW, "all", logprobs=2),
        Submit(14, NEW, lens=20),
        Submit(30, 3, "prompt", "few"),
    ]
    served = serve(schedule, Bounds(max_running=5, prefill_tokens=16, positions=48, capture_bytes=60_000), torch.inf)
    assert served.engine.statistics.preempted > 0 or not served.engine._memory.position_bytes
    assert served.stood_still > 0  # until rows were written
    assert sum(isinstance(event, Rows) for event in served.events) > 4


submits = st.builds(
    Submit,
    length=st.sampled_from(LENGTHS),
    max_tokens=st.sampled_from([0, 1, 3, *[NEW] * 5]),
    tokens=st.sampled_from([None, None, *TOKENS]),
    points=st.sampled_from(["canonical", "few", "patterns"]),
    logprobs=st.sampled_from([None, 0, 3]),
    prompt_logprobs=st.sampled_from([None, None, 0, 3]),
    lens=st.sampled_from([None, None, 1, 20]),
    breaks=st.sampled_from([*[None] * 30, 0.0, 0.3, 1.0, "8", "1000"]),
)
pauses = st.one_of(
    st.builds(Step, st.integers(0, 4)),
    st.builds(Step, st.integers(0, 4)),
    st.builds(Cancel, st.integers(0, 15)),
    st.builds(Write, st.integers(0, 5)),
)
schedules = st.lists(st.tuples(submits, pauses, pauses), min_size=5, max_size=12).map(lambda turns: sum(turns, ()))
bounds = st.builds(
    Bounds,
    max_running=st.sampled_from([2, 3, 4, 6, 8]),
    prefill_tokens=st.sampled_from([8, 16, 40, 4096]),
    positions=st.sampled_from([64, 64, 128, 1024]),
    capture_bytes=st.sampled_from([None, 1, 60_000, 300_000]),
)


def test_any_schedule_gives_each_request_what_it_gets_alone(architecture, attention, serve):
    @seed(crc32(f"{architecture} {attention}".encode()))
    @settings(max_examples=EXAMPLES, deadline=None, database=None, phases=[Phase.generate])  # shrinking takes minutes
    @given(schedules, bounds, st.sampled_from([torch.inf, -torch.inf, torch.nan]))
    def any_schedule(schedule, bounds, value):
        serve(schedule, bounds, value)

    any_schedule()
