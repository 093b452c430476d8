"""A process that really runs out of memory ends as few requests as possible, reports why, and goes on."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from deployments.engine.engine import Engine
from deployments.engine.request import Request
from deployments.model.model import Model

CHILD = """
import json, resource, sys
sys.path.insert(0, {tests!r})
import torch
import conftest
from deployments.engine.engine import Engine
from deployments.engine.device_memory import held_bytes
from deployments.model.model import Model
from deployments.engine.request import Request

torch.set_num_threads(1)
size = {{"max_position_embeddings": 16384, "num_hidden_layers": 2, "intermediate_size": 16384}}
model = Model(conftest._build("qwen3", **size), conftest._byte_tokenizer(), "qwen3")
engine = Engine(model, prefill_tokens=4096, kv_bytes=8 << 30)
requests = [Request(name, [9] * length, new, ignore_eos=True) for name, length, new in {requests}]
if {limited}:
    pages = int(open("/proc/self/statm").read().split()[0]) * 4096
    resource.setrlimit(resource.RLIMIT_AS, (pages + ({limit} << 20),) * 2)
done = engine.generate(requests)
(after,) = engine.generate([Request("after", [7] * 20, 4, ignore_eos=True)])
print(json.dumps({{
    "done": [[f.id, f.reason, f.code, f.error, list(f.tokens)] for f in (*done, after)],
    "failures": engine.statistics.out_of_memory,
}}))
"""

pytestmark = pytest.mark.slow


def in_a_process(requests, limit=None):
    """Serve requests in a process that may take `limit` MiB more than its model; gives what became of each."""
    tests = str(Path(__file__).parents[1])
    code = CHILD.format(tests=tests, requests=requests, limited=limit is not None, limit=limit)
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr[-2000:]
    answer = json.loads(ran.stdout.splitlines()[-1])
    return {id: rest for id, *rest in answer["done"]}, answer["failures"]


only_linux = pytest.mark.skipif(
    sys.platform != "linux", reason="other systems do not hold a process to its address space"
)


@pytest.fixture(scope="module")
def roomy():
    """What requests get where there is memory."""
    done, failures = in_a_process([("short", 30, 8), ("long", 4500, 4), ("other", 200, 8)])
    assert failures == 0
    return done


@only_linux
def test_a_prompt_for_which_one_forward_has_no_memory_is_run_in_smaller_pieces(roomy):
    got, failures = in_a_process([("short", 30, 8), ("long", 4500, 4), ("other", 200, 8)], limit=250)
    assert failures > 0
    assert got == roomy
    assert got["long"][0] == "length"


def test_a_request_that_finds_no_memory_at_all_ends_alone_and_says_how_much_it_needed(tiny, prompt, monkeypatch):
    model, forward = tiny("qwen3", max_position_embeddings=1024), Model.forward
    requests = [Request(str(length), prompt(length), 8, ignore_eos=True) for length in (30, 900, 200)]
    want = [done.tokens for done in Engine(model).generate(requests)]

    def no_memory_for_long_ones(model, ids, spans, *rest, **options):
        if any(span.start + span.count > 500 for span in spans):
            raise torch.OutOfMemoryError("Tried to allocate 9.00 GiB")
        return forward(model, ids, spans, *rest, **options)

    monkeypatch.setattr(Model, "forward", no_memory_for_long_ones)
    short, long, other = Engine(model).generate(requests)
    assert [short.tokens, other.tokens] == [want[0], want[2]]
    assert (long.reason, long.code) == ("error", "out_of_memory")
    for said in ("allocated", "reserved", "asked for", "900 prompt", "keys and values"):
        assert said in long.error
