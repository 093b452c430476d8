"""Rows of a stored run replace a request's rows: exact, paired by token, or rejected by field."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter

from deployments.activations.actors.store import ActivationStore
from deployments.activations.reader.loading import read_run
from deployments.engine.request import GREEDY, Sampling
from deployments.job import Job
from deployments.messages import End, Refusal
from deployments.options import Options
from deployments.points.capture import Capture
from deployments.points.interventions import Interventions
from deployments.replica.replica import ModelReplica
from tests.store_handle import Handle

pytestmark = pytest.mark.usefixtures("cluster")  # rows go through the object store

FLAT = "model.layers.2.self_attn.o_proj.input"  # the same rows as HEADS
CLEAN, CORRUPTED = [5, 17, 40, 9, 33, 21, 8], [5, 17, 41, 90, 33, 21, 8]
LAYERS, HEADS = "layers.*.output", "layers.2.attention.heads"
NEW = 4


class Patching:
    """A replica and its store.

    Attributes:
        dtype: The model's.
    """

    def __init__(self, root: str, dtype: str, **options: Any) -> None:
        self.dtype = getattr(torch, dtype)
        self._store = ActivationStore(root)
        self._replica = ModelReplica.func_or_class(
            Options(dtype=dtype, threads=1, **options), store=Handle(self._store)
        )
        self._count = 0

    def job(self, prompt: list[int], *interventions: dict[str, Any], **fields: Any) -> Job:
        """A request that is recorded."""
        points = ["embed.output", LAYERS, HEADS, "lm_head.output"]
        capture = Capture.model_validate({"points": points} | fields.pop("capture", {}))
        specs = TypeAdapter(Interventions).validate_python(list(interventions)) if interventions else ()
        self._count += 1
        return Job(
            f"job{self._count}",
            prompts=fields.pop("prompts", [prompt]),
            capture=capture,
            interventions=tuple(specs),
            session_id="s",
            **{"max_tokens": NEW, "ignore_eos": True, "sampling": GREEDY} | fields,
        )

    def ask(self, *args: Any, **fields: Any) -> Any:
        """The last message of a recorded request."""
        last = asyncio.run(self._replica.complete(self.job(*args, **fields)))[-1]
        assert isinstance(last, End | Refusal)
        return last

    def run(self, *args: Any, **fields: Any) -> Any:
        """What a request recorded."""
        end = self.ask(*args, **fields)
        assert isinstance(end, End), end
        return read_run(next(iter(end.run.points.values()))["uri"], run_id=end.run.run_id)

    def refusal(self, *interventions: dict[str, Any], **fields: Any) -> tuple[str | None, str, str]:
        refused = self.ask(CORRUPTED, *interventions, **fields)
        assert isinstance(refused, Refusal), refused
        assert refused.status == 400
        return refused.field, refused.code, refused.message

    def steps(self) -> int:
        return asyncio.run(self._replica.statistics())["steps"]

    def delete(self) -> None:
        asyncio.run(self._store.delete("s"))

    def close(self) -> None:
        self._replica.__del__()
        self._store._writer.close()


@pytest.fixture(scope="module", autouse=True)
def home(tmp_path_factory):
    """Where the stores' indexes go."""
    if "VITRINE_HOME" in os.environ:
        yield
        return
    os.environ["VITRINE_HOME"] = home = str(tmp_path_factory.mktemp("home"))
    yield
    if os.environ["VITRINE_HOME"] == home:  # otherwise the shared cluster, which started meanwhile, has set its own
        del os.environ["VITRINE_HOME"]


@pytest.fixture(scope="module")
def serving(tmp_path_factory):
    """`serving(dtype)`: a replica of the shipped model."""
    made: dict[str, Patching] = {}

    def serving(dtype: str) -> Patching:
        if dtype not in made:
            made[dtype] = Patching(str(tmp_path_factory.mktemp(dtype)), dtype)
        return made[dtype]

    yield serving
    for one in made.values():
        one.close()


@pytest.fixture(params=["float32", "bfloat16"])
def patching(request: pytest.FixtureRequest, serving: Callable[[str], Patching]) -> Patching:
    return serving(request.param)


@pytest.fixture
def plain(serving: Callable[[str], Patching]) -> Patching:
    return serving("float32")


def source(run, **more):
    return {"run_id": run.facts.run_id, **more}


def replaced(run, where=LAYERS, to="all", of=None, **more):
    """Tokens `to` get the rows of the run's tokens `of`, or of the same ones."""
    return {"op": "replace", "point": where, "tokens": to, "from": source(run, tokens=of or to, **more)}


def assert_same(a, b, rows=slice(None)):
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name][rows], b[name][rows]), name


@pytest.mark.parametrize(
    ("dtype", "tokens"),
    [
        ("bfloat16", "all"),
        *(
            ("float32", tokens)
            for tokens in ("all", "prompt", "generated", "prompt_last", {"prompt_last": 3}, {"positions": [0, 8, 2]})
        ),
    ],
)
def test_a_run_put_into_itself_changes_no_bit(serving, dtype, tokens):
    patching = serving(dtype)
    clean = patching.run(CLEAN)
    assert clean["layers.3.output"].dtype == patching.dtype
    again = patching.run(CLEAN, replaced(clean, LAYERS, tokens), replaced(clean, HEADS, tokens))
    assert_same(again, clean)
    assert again.token_ids.tolist() == clean.token_ids.tolist()


def test_rows_go_to_tokens_in_the_order_in_which_both_are_listed(plain):
    clean, corrupted = plain.run(CLEAN), plain.run(CORRUPTED)
    point = "layers.2.output"
    got = plain.run(CORRUPTED, replaced(clean, point, {"positions": [6, 2]}, {"positions": [1, 3]}))[point]
    assert torch.equal(got[[6, 2]], clean[point][[1, 3]])
    untouched = [0, 1, 3, 4, 5]
    assert torch.equal(got[untouched], corrupted[point][untouched])
    twice = plain.run(CORRUPTED, replaced(clean, point, {"prompt_last": 2}, {"positions": [4, 4]}))[point]
    assert torch.equal(twice[[5, 6]], clean[point][[4, 4]])


def test_a_part_of_a_row_takes_the_same_part_of_the_stored_one(plain):
    clean, corrupted = plain.run(CLEAN), plain.run(CORRUPTED)
    point = "layers.3.output"
    one = replaced(clean, point, "prompt_last") | {"features": {"index": [7, 2]}}
    got, at = plain.run(CORRUPTED, one)[point], len(CLEAN) - 1
    want = corrupted[point][at].clone()
    want[[7, 2]] = clean[point][at][[7, 2]]
    assert torch.equal(got[at], want)
    one = replaced(clean, HEADS, "prompt_last") | {"heads": [1]}
    want = corrupted[HEADS][at].clone()
    want[1] = clean[HEADS][at][1]
    assert torch.equal(plain.run(CORRUPTED, one)[HEADS][at], want)


def test_a_point_takes_another_points_rows_by_any_name_of_it(plain):
    clean = plain.run(CLEAN)
    for name in ("layers.1.output", "layers.-5.output", "model.layers[1].output"):
        got = plain.run(CORRUPTED, replaced(clean, "layers.3.output", "prompt_last", point=name))
        assert torch.equal(got["layers.3.output"][len(CLEAN) - 1], clean["layers.1.output"][len(CLEAN) - 1])
    by_head = plain.run(CORRUPTED, capture={"points": [FLAT]})
    got = plain.run(CLEAN, replaced(by_head, HEADS, "prompt_last", point=FLAT))
    assert torch.equal(got[HEADS][6].flatten(), by_head[FLAT][6])
    all_of_one = plain.run(CORRUPTED, replaced(clean, LAYERS, "prompt_last", point="layers.1.output"))
    assert torch.equal(all_of_one["layers.5.output"][6], clean["layers.1.output"][6])


def test_rows_recorded_in_float32_are_rounded_to_a_narrower_model_once(serving):
    wide, narrow = serving("float32"), serving("bfloat16")
    recorded = narrow.run(CLEAN, capture={"dtype": "float32"})
    assert recorded["layers.3.output"].dtype == torch.float32
    plain = narrow.run(CLEAN)
    again = narrow.run(CLEAN, replaced(recorded))
    assert_same(again, plain)
    assert wide.dtype == torch.float32


def test_each_prompt_of_a_request_gets_the_rows(plain):
    clean = plain.run(CLEAN)
    end = plain.ask([], replaced(clean, "layers.3.output", "prompt_last"), prompts=[CLEAN, CORRUPTED])
    assert isinstance(end, End)
    found = read_run(next(iter(end.run.points.values()))["uri"], run_id=end.run.run_id)
    assert torch.equal(found["layers.3.output"][6], clean["layers.3.output"][6])


def bad(run, narrow):
    """Interventions that cannot be, each with the field that says so and its code."""
    point, whole = "layers.3.output", source(run)
    return [
        ({"from": source(run) | {"run_id": "run-none-0"}}, "from.run_id", "run_not_found"),
        ({"from": source(run) | {"run_id": "../../etc/passwd"}}, "from.run_id", "run_not_found"),
        ({"point": "layers.3.mlp.output", "from": whole}, "from.point", "point_not_recorded"),
        ({"from": source(run, point="layers.3.outputt")}, "from.point", "point_not_recorded"),
        ({"point": LAYERS, "from": source(run, point="layers.*.mlp.output")}, "from.point", "point_not_recorded"),
        ({"from": source(run, point=LAYERS)}, "from.point", "invalid_value"),
        ({"from": source(narrow)}, "from.point", "invalid_value"),
        ({"from": source(run, point="lm_head.output")}, "from.point", "invalid_value"),
        ({"tokens": "prompt", "from": whole}, "from.tokens", "invalid_value"),
        ({"tokens": "generated", "from": whole}, "from.tokens", "invalid_value"),
        ({"tokens": "prompt_last", "from": source(run, tokens={"prompt_last": 2})}, "from.tokens", "invalid_value"),
        (
            {"tokens": {"prompt_last": 2}, "from": source(run, tokens={"positions": [99, 1]})},
            "from.tokens",
            "invalid_value",
        ),
        ({"tokens": {"positions": [1, 1]}, "from": source(run, tokens={"prompt_last": 2})}, "tokens", "invalid_value"),
        ({"point": "layers.99.output", "from": whole}, "point", "invalid_value"),
        ({"point": "embed.input", "from": whole}, "from.point", "point_not_recorded"),
    ], {"op": "replace", "point": point}


def test_what_does_not_fit_is_refused_by_its_field_and_nothing_runs(plain):
    run, narrow = plain.run(CLEAN), plain.run(CLEAN, capture={"features": {"first": 4}})
    cases, base = bad(run, narrow)
    before = plain.steps()
    for more, field, code in cases:
        assert plain.refusal(base | more)[:2] == (f"interventions[0].{field}", code), more
    zero = {"op": "zero", "point": "layers.0.output"}
    assert plain.refusal(zero, base | cases[0][0])[0] == "interventions[1].from.run_id"
    message = plain.refusal(base | {"from": source(narrow)})[2]
    assert "[4]" in message
    assert "[192]" in message
    message = plain.refusal(base | {"from": source(run)}, max_tokens=NEW + 1)[2]
    assert str(len(CLEAN) + NEW) in message
    assert str(len(CLEAN) + NEW + 1) in message
    assert plain.steps() == before


def test_a_run_that_came_inline_or_was_deleted_is_none(tmp_path):
    patching = Patching(str(tmp_path), "float32")
    inline = patching.ask(CLEAN, capture={"return": "inline", "points": ["layers.3.output"]})
    one = {"op": "replace", "point": "layers.3.output"}
    told = patching.refusal(one | {"from": {"run_id": inline.run.run_id}})
    assert told[:2] == ("interventions[0].from.run_id", "run_not_found")
    run = patching.run(CLEAN)
    patching.run(CORRUPTED, replaced(run))
    patching.delete()
    assert patching.refusal(replaced(run))[1] == "run_not_found"
    patching.close()


def test_rows_beyond_the_operators_limit_are_refused_with_it_and_leave_room_when_their_request_ends(tmp_path):
    tokens = len(CLEAN) + NEW
    room = 4 * 192 * tokens * 2  # two points
    patching = Patching(str(tmp_path), "float32", max_request_tensor_bytes=room)
    run = patching.run(CLEAN)
    two = [replaced(run, f"layers.{i}.output") for i in (1, 2)]
    for _ in range(3):
        patching.run(CORRUPTED, *two)
    for asked, field in ((two + two[:1], "interventions[2].from"), ([replaced(run)], "interventions[0].from")):
        told = patching.refusal(*asked)
        assert told[:2] == (field, "rows_too_large")
        assert str(room) in told[2]
    patching.run(CORRUPTED, *two)
    patching.close()


def test_a_vector_in_the_request_counts_as_a_named_one_does(tmp_path):
    patching = Patching(str(tmp_path), "float32", max_request_tensor_bytes=4 * 192)
    add = {"op": "add", "point": "layers.1.output", "vector": [1.0] * 192}
    patching.run(CLEAN, add)
    assert patching.refusal(add, add)[:2] == ("interventions[1].vector", "rows_too_large")
    patching.close()


def test_rows_for_which_others_leave_no_room_now_get_429(tmp_path):
    patching = Patching(str(tmp_path), "float32", max_request_tensor_bytes=4 * 192)
    one = replaced(patching.run(CLEAN), "layers.2.output", "prompt_last")

    async def both():
        first = patching._replica.stream(patching.job(CORRUPTED, one, max_tokens=2000))
        await anext(first)
        refused = (await patching._replica.complete(patching.job(CORRUPTED, one)))[-1]
        await first.aclose()
        return refused, (await patching._replica.complete(patching.job(CORRUPTED, one)))[-1]

    refused, served = asyncio.run(both())
    assert (refused.status, refused.code) == (429, "server_busy")
    assert isinstance(served, End)
    patching.close()


def test_each_variant_is_a_choice_as_if_it_were_asked_alone(plain):
    """Over one prompt, behind the request's own interventions, with one seed; the first without any is the baseline."""
    clean = plain.run(CLEAN)
    base = {"op": "scale", "point": "layers.0.output", "factor": 1.5, "tokens": "generated"}
    patches = [replaced(clean, f"layers.{i}.output", {"prompt_last": 1 + i}, {"prompt_last": 1 + i}) for i in range(4)]
    variants = [(), *((one,) for one in patches), (patches[0], patches[2])]
    adapted = tuple(tuple(TypeAdapter(Interventions).validate_python(list(one))) for one in variants)
    sampling = Sampling(temperature=1.0, seed=5)
    together = plain.job(CORRUPTED, base, variants=adapted, n=len(adapted), sampling=sampling)
    messages = asyncio.run(plain._replica.complete(together))
    ends = sorted((one for one in messages if isinstance(one, End)), key=lambda end: end.index)
    assert [end.index for end in ends] == [*range(len(variants))]
    for end, variant in zip(ends, variants, strict=True):
        stored = read_run(next(iter(end.run.points.values()))["uri"], run_id=end.run.run_id)
        alone = plain.run(CORRUPTED, base, *variant, sampling=sampling)
        assert stored.token_ids.tolist() == alone.token_ids.tolist()
        assert len(stored.facts.interventions) == 1 + len(variant)
        for name in alone:
            torch.testing.assert_close(stored[name], alone[name], rtol=1e-4, atol=1e-4)


def test_a_variants_mistake_is_named_by_its_place(plain):
    clean = plain.run(CLEAN)
    sound, wrong = replaced(clean), replaced(clean, "layers.99.output")
    adapted = tuple(tuple(TypeAdapter(Interventions).validate_python([one])) for one in (sound, wrong))
    assert plain.refusal(variants=adapted, n=2)[0] == "variants[1][0].point"
    elsewhere = {**sound, "from": {**sound["from"], "point": "layers.3.mlp.output"}}
    adapted = tuple(tuple(TypeAdapter(Interventions).validate_python([one])) for one in (sound, elsewhere))
    assert plain.refusal(variants=adapted, n=2)[0] == "variants[1][0].from.point"


@pytest.mark.parametrize("more", [{}, {"features": {"index": [3, 1, 8]}}, {"heads": [2, 0]}])
def test_a_vector_in_units_of_the_norm_is_as_long_as_the_scale_says_and_the_norm_is_told(plain, more):
    point = "layers.2.attention.heads" if "heads" in more else "layers.2.output"
    base = plain.run(CLEAN, max_tokens=0, capture={"points": [point]})[point]  # [tokens, ...]
    index = more.get("features", {}).get("index", slice(None))
    part = (lambda rows: rows[:, [2, 0]]) if "heads" in more else (lambda rows: rows[..., index])
    vector = torch.randn(part(base).shape[-1], generator=torch.Generator().manual_seed(0))
    add = {"op": "add", "point": point, "vector": vector.tolist(), "scale": -0.5, "unit": "residual_norm"} | more
    end = plain.ask(CLEAN, add | {"tokens": "prompt_last"}, max_tokens=0, capture={"points": [point]})
    got = read_run(next(iter(end.run.points.values()))["uri"], run_id=end.run.run_id)[point]
    norms = part(base)[-1:].norm(dim=-1, keepdim=True)
    torch.testing.assert_close(part(got)[-1:], part(base)[-1:] - 0.5 * norms * vector / vector.norm())
    assert torch.equal(got[:-1], base[:-1])
    (told,) = end.norms
    assert (told.param, told.point) == ("interventions[0]", point)
    assert told.norm == pytest.approx(float(norms.mean()), rel=1e-5)


def test_units_of_the_norm_leave_the_first_token_as_it_is_unless_it_is_named(plain):
    """And outliers among the changed rows are counted: the first token's row is made 100 times as long."""
    point = "layers.2.output"
    longer = {"op": "scale", "point": point, "factor": 100.0, "tokens": {"positions": [0]}}
    add = {"op": "add", "point": point, "vector": [1.0] * 192, "unit": "residual_norm"}
    base = plain.run(CLEAN, longer, max_tokens=0, capture={"points": [point]})[point]
    for more, first, outliers in (({}, 1, 0), ({"tokens": "all"}, 0, 1), ({"tokens": {"from": 2}}, 2, 0)):
        end = plain.ask(CLEAN, longer, add | more, max_tokens=0, capture={"points": [point]})
        run = read_run(next(iter(end.run.points.values()))["uri"], run_id=end.run.run_id)
        assert (run[point] != base).any(dim=1).nonzero().flatten().tolist() == [*range(first, len(CLEAN))]
        assert end.norms[0].outliers == outliers
    assert plain.refusal(add | {"tokens": {"from": 999}})[0] == "interventions[0].tokens"


def test_each_choice_has_the_norms_of_its_own_rows(plain):
    add = {"op": "add", "point": "layers.2.output", "vector": [1.0] * 192, "unit": "residual_norm", "scale": 0.0}
    asked = plain.job(CLEAN, add | {"tokens": "generated"}, n=2, sampling=Sampling(temperature=2.0, seed=1))
    messages = asyncio.run(plain._replica.complete(asked))
    for end in (message for message in messages if isinstance(message, End)):
        stored = read_run(next(iter(end.run.points.values()))["uri"], run_id=end.run.run_id)
        rows = stored["layers.2.output"][len(CLEAN) :]
        assert end.norms[0].norm == pytest.approx(float(rows.norm(dim=-1).median()), rel=1e-4)
