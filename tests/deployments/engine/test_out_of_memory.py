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
sys.path.insert(0, {root!r})
import torch
from tests.deployments import conftest
from deployments.engine.engine import Engine
from deployments.model.model import Model
from deployments.engine.request import Request

torch.set_num_threads(1)
size = {{"max_position_embeddings": 16384, "num_hidden_layers": 1, "intermediate_size": 8192}}
model = Model(conftest._build("qwen3", **size), conftest._byte_tokenizer(), "qwen3")

def served(engine):
    done = engine.generate([Request(name, [9] * length, new, ignore_eos=True) for name, length, new in {requests}])
    done += engine.generate([Request("after", [7] * 20, 4, ignore_eos=True)])
    return {{f.id: [f.reason, f.code, f.error, list(f.tokens)] for f in done}}, engine.statistics.out_of_memory

first, second = (Engine(model, prefill_tokens=4096, kv_bytes=8 << 30) for _ in range(2))
roomy = served(first)
pages = int(open("/proc/self/statm").read().split()[0]) * 4096
resource.setrlimit(resource.RLIMIT_AS, (pages + ({limit} << 20),) * 2)
print(json.dumps([roomy, served(second)]))
"""

pytestmark = pytest.mark.slow


@pytest.mark.long  # half a minute; the next test makes the same error up
@pytest.mark.cpu
@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not hold a process to its address space")
def test_a_prompt_for_which_one_forward_has_no_memory_is_run_in_smaller_chunks():
    requests = [("short", 30, 8), ("long", 4500, 4), ("other", 200, 8)]
    code = CHILD.format(root=str(Path(__file__).parents[3]), requests=requests, limit=110)  # MiB
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr[-2000:]
    (want, none), (got, failures) = json.loads(ran.stdout.splitlines()[-1])
    assert none == 0
    assert failures > 0
    assert got == want
    assert got["long"][0] == "length"


def test_a_request_that_finds_no_memory_at_all_ends_alone_and_says_how_much_it_needed(tiny, prompt, monkeypatch):
    """And one whose prompt finds none in one forward runs in smaller chunks."""
    model, forward = tiny("qwen3", max_position_embeddings=1024), Model.forward
    requests = [Request(str(length), prompt(length), 8, ignore_eos=True) for length in (30, 900, 200)]
    want = [done.tokens for done in Engine(model).generate(requests)]

    def no_memory_for_long_ones(model, batch, *rest, **options):
        if any(span.start + span.count > 500 for span in batch.spans):
            raise torch.OutOfMemoryError("Tried to allocate 9.00 GiB")
        if batch.rows > 150:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")  # torch's words
        return forward(model, batch, *rest, **options)

    monkeypatch.setattr(Model, "forward", no_memory_for_long_ones)
    short, long, other = Engine(model).generate(requests)
    assert [short.tokens, other.tokens] == [want[0], want[2]]
    assert (long.reason, long.code) == ("error", "out_of_memory")
    for said in ("allocated", "reserved", "asked for", "900 prompt", "keys and values"):
        assert said in long.error
