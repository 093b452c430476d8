"""nnsight's own client, unmodified, with the served model: examples of its guide work as they do locally."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import websocket
from transformers import AutoModelForCausalLM, AutoTokenizer

from deployments.client_code.job import CLASS
from deployments.demo_model import WEIGHTS
from serve_app.routes.nnsight import CODE_DISABLED
from tests import programs
from tests.adapters import lora
from tests.programs import Said

DOCS = Path(__file__).parents[3] / "docs"
ADDRESS = "http://127.0.0.1:8000"
GUIDE = Path(__file__).with_name("nnsight_guide.py")
SECTIONS = [line[4 : line.index("(")] for line in GUIDE.read_text().splitlines() if line.endswith("(model, remote):")]
SHOWN = [name for name in SECTIONS if not name.startswith("error_of_")]
WRONG = {
    "error_of_next": ("AttributeError", "has attribute 'next'"),
    "error_of_a_block": ("RuntimeError", "Expected size"),
    "error_of_a_wrong_layer": ("AttributeError", "has attribute '99'"),
}
CHAT = {"model": "vitrine-demo", "messages": [{"role": "user", "content": "2+2?"}], "max_tokens": 16, "temperature": 0}


def block(*lines: str, setup: str = "", call: str = "model.trace('Ann has 3 boxes', remote=True)") -> str:
    """A client's program of one block."""
    return "\n".join(
        [
            "import torch, nnsight, time, sys",
            "from nnsight import TransformersModel",
            "from nnsight.modeling import huggingface",
            "from transformers import AutoTokenizer",
            f"PATH = {str(WEIGHTS)!r}",
            "huggingface._ID_CACHE[PATH] = PATH",
            "made = dict(task='text-generation', tokenizer=AutoTokenizer.from_pretrained(PATH))",
            "model = TransformersModel(PATH, **made)",
            *setup.splitlines(),
            f"with {call} as tracer:",
            *(f"    {line}" for line in lines[:-1]),
            lines[-1],
        ]
    )


@pytest.fixture(scope="module")
def interpreter(runs_code):
    """A client's process, which knows nothing but the server's address and runs many programs."""
    env = os.environ | {"NDIF_HOST": runs_code, "HF_HUB_OFFLINE": "1", "NO_COLOR": "1"}
    with programs.interpreter(sys.executable, env) as running:
        yield running


@pytest.fixture
def execute(interpreter, tmp_path):
    """Runs a client's program against the server."""
    numbers = itertools.count()

    def execute(code: str) -> Said:
        program = tmp_path / f"client{next(numbers)}.py"  # nnsight reads a file once
        program.write_text(code)
        return interpreter.run(program)

    return execute


@pytest.fixture
def run(execute):
    """Runs a program of one block against the server."""
    return lambda *lines, **how: execute(block(*lines, **how))


@pytest.fixture(scope="module")
def guide(interpreter, tmp_path_factory):
    """What each section of the guide saved, run over the server and without it."""
    folder = tmp_path_factory.mktemp("guide")
    program, found = folder / "program.py", folder / "found.pt"
    argv = [str(GUIDE), str(WEIGHTS), str(found)]
    program.write_text(f"import runpy, sys\nsys.argv = {argv}\nrunpy.run_path(sys.argv[0], run_name='__main__')")
    said = interpreter.run(program)
    assert found.exists(), said.stdout[-2000:] + said.stderr[-4000:]
    return torch.load(found, weights_only=False)


@pytest.mark.parametrize("section", SHOWN)
def test_a_section_of_nnsights_guide_gives_the_same_over_the_server(guide, section):
    for where in ("remote", "local"):
        assert "value" in guide[section][where], guide[section][where].get("trace")
    torch.testing.assert_close(
        guide[section]["remote"]["value"], guide[section]["local"]["value"], rtol=1e-4, atol=1e-3
    )


@pytest.mark.parametrize("section", WRONG)
def test_a_failing_block_fails_at_the_client_with_its_own_type_and_line(guide, section):
    kind, said = WRONG[section]
    error = guide[section]["remote"]["error"]
    assert error.startswith("RemoteError")
    assert f"{kind}: " in error.splitlines()[-1]
    assert said in error.splitlines()[-1]
    assert GUIDE.name in error
    assert f"in {section}" in error
    assert guide[section]["local"]["error"].splitlines()[-1] == error.splitlines()[-1]  # nnsight's own words


def test_what_a_block_prints_comes_as_a_log(run):
    done = run("print('seen', model.model.layers[0].output.shape[-1])", "print('then')", "pass")
    assert "LOG" in done.stdout
    assert "seen 192" in done.stdout
    assert done.stdout.index("seen 192") < done.stdout.index("then") < done.stdout.index("COMPLETED")


def test_a_large_result_is_fetched_by_its_address_and_a_larger_one_refused(run):
    fetched = run("value = (torch.arange(1_000_000) * 1.5).save()", "print(float(value.sum()))")
    assert float(fetched.stdout.split()[-1]) == float((torch.arange(1_000_000) * 1.5).sum())
    refused = run("value = torch.rand(24_000_000).save()", "pass")
    assert "the saved values take" in refused.stderr
    assert "returns at most 62500000" in refused.stderr


def test_uncompressed_blocks_and_results_are_taken(run):
    done = run(
        "value = model.model.layers[0].output.sum().save()",
        "nnsight.CONFIG.API.COMPRESS = True\nprint('sum', float(value))",
        setup="nnsight.CONFIG.API.COMPRESS = False",
    )
    assert "sum" in done.stdout.split()


def test_a_view_travels_without_the_tensor_it_shows(run):
    done = run("value = torch.ones(5_000_000)[:3].save()", "print(value.tolist(), value.untyped_storage().nbytes())")
    assert "[1.0, 1.0, 1.0] 12" in done.stdout


def test_a_job_without_a_socket_is_asked_for_by_its_id(run):
    done = run(
        "value = model.model.layers[0].output.sum().save()",
        "\n".join(
            [
                "backend = tracer.backend",
                "assert backend.job_id",
                "import httpx",
                "while (found := backend.poll()) is None: time.sleep(0.1)",
                "told = httpx.get(f'{backend.host}/response/{backend.job_id}', timeout=60).json()",
                "assert told['data'].startswith(f'{backend.host}/response/')",
                "print('polled', sorted(found))",
            ]
        ),
        call="model.trace('Ann has', remote=True, blocking=False)",
    )
    assert "polled ['value']" in done.stdout, done.stderr[-2000:]


def test_an_awaited_job_gives_its_saved_values(run):
    done = run(
        "value = model.model.layers[0].output.sum().save()",
        "import asyncio\nasync def wait(): return await backend\nprint('awaited', sorted(asyncio.run(wait())))",
        setup="from nnsight.intervention.backends.remote import AsyncRemoteBackend\n"
        "backend = AsyncRemoteBackend(model.to_model_key())",
        call="model.trace('Ann has', backend=backend)",
    )
    assert "awaited ['value']" in done.stdout, done.stderr[-2000:]


def test_the_status_and_the_environment_are_as_nnsight_reads_them(execute):
    done = execute(
        "import nnsight; print(nnsight.status()); c = nnsight.compare(); print(c.critical_mismatches, c.python_matches)"
    )
    assert "Up" in done.stdout
    assert "vitrine-demo" in done.stdout
    assert "RUNNING" in done.stdout
    assert done.stdout.splitlines()[-1] == "{} True"


def examples() -> list[Any]:
    """The page's Python, each block of its experiments behind the page's first, which sets up."""
    setup, *experiments = re.findall(
        r"^```python\n(.*?)^```", (DOCS / "nnsight.md").read_text(), re.DOTALL | re.MULTILINE
    )
    return [pytest.param(setup + code, id=str(number)) for number, code in enumerate(["", *experiments])]


@pytest.mark.parametrize("code", examples())
def test_an_example_of_the_page_works_and_the_client_finds_the_same(execute, runs_code, code):
    said = execute(code.replace(ADDRESS, runs_code))
    assert "Traceback" not in said.stderr, said.stderr
    assert "torch.Size([1, 13, 192]) False" in said.stdout
    by_nnsight, by_the_client = said.stdout.splitlines()[-2:]
    if code != examples()[0].values[0]:
        assert by_nnsight == by_the_client


# ---- what a job may not do


ATTRIBUTION = """
import numpy as np, torch, vitrine
from transformers import AutoModelForCausalLM, AutoTokenizer
server, prompts = vitrine.connect("ROOT"), ["Tom has 3 boxes of 12", "Now Tom has 4 boxes of 12"]
fields = dict(target=" pens", against=" boxes", sites=["resid", "heads"], layers=[2])
grid = server.patch_grid(*prompts, method="attribution", compare=True, **fields)
hf, ids = AutoModelForCausalLM.from_pretrained("PATH", dtype=torch.float32), AutoTokenizer.from_pretrained("PATH")
layer, runs = hf.model.layers[2], []
keep = lambda value: runs[-1].append(value) or value.retain_grad()
layer.self_attn.o_proj.register_forward_pre_hook(lambda _, args: keep(args[0]))
layer.register_forward_hook(lambda _, args, output: keep(output))
for prompt in prompts:
    runs.append([])
    logits = hf(**ids(prompt, return_tensors="pt"), use_cache=False).logits[0, -1]
target, against = (ids(text).input_ids[0] for text in (" pens", " boxes"))
value = logits[target] - logits[against]
value.backward()
at, into = (list(side) for side in zip(*grid.positions))
heads, resid = ((own[0, at] - other[0, into]) * other.grad[0, into] for own, other in zip(*runs))
want = torch.cat([resid.sum(-1)[None], heads.unflatten(-1, (4, -1)).sum(-1).T])
print(np.corrcoef(grid.changes.ravel(), want.detach().numpy().ravel())[0, 1] > 0.99)
print(abs(grid.unpatched - float(value)) < 0.1, 0.3 < grid.correlation <= 1, grid.floor is not None)
"""


def test_an_attribution_is_the_change_along_the_gradient(execute, runs_code):
    said = execute(ATTRIBUTION.replace("ROOT", runs_code).replace("PATH", str(WEIGHTS)))
    assert said.stdout.splitlines()[-2:] == ["True", "True True True"], said.stdout + said.stderr


def answered(root: str) -> str:
    answer = httpx.post(f"{root}/v1/chat/completions", json=CHAT, timeout=60)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["message"]["content"])


def test_a_block_that_loops_is_stopped_while_other_requests_go_on(run, runs_code):
    before = answered(runs_code)
    with ThreadPoolExecutor() as pool:
        looping = pool.submit(run, "print('begins')", "while True: pass", "pass")
        others = []
        while not looping.done():
            others.append(answered(runs_code))
    done = looping.result()
    assert "begins" in done.stdout
    assert "TimeoutError" in done.stderr
    assert "limit of 10 s" in done.stderr
    assert "client0.py" in done.stderr  # where it was
    assert len(others) > 5
    assert set(others) == {before}


def test_a_block_that_hides_from_its_limit_is_killed(run):
    done = run(
        "while True:",
        "    try:",
        "        while True: time.sleep(0.1)",
        "    except BaseException: pass",
        "pass",
    )
    assert "did not stop at the server's limit of 10 s" in done.stderr


def test_a_block_that_takes_all_memory_is_stopped_while_other_requests_go_on(run, runs_code):
    before = answered(runs_code)
    with ThreadPoolExecutor() as pool:
        taking = pool.submit(run, "held = []", "while True: held.append(torch.empty(10_000_000))", "pass")
        others = [answered(runs_code)]
        while not taking.done():
            others.append(answered(runs_code))
    done = taking.result()
    assert "memory" in done.stderr
    assert "client0.py" in done.stderr
    assert set(others) == {before}


def test_a_process_that_is_killed_from_within_is_told_of(run):
    done = run("import ctypes", "ctypes.string_at(0)", "pass")  # no signal of its own kills the first of its processes
    assert "the job's process ended without a report" in done.stderr
    assert "sum" in run("value = model.output.logits.sum().save()", "print('sum', float(value))").stdout.split()


def test_a_job_holds_none_of_the_servers_keys_and_files(run):
    done = run(
        "import os",
        "names = sorted(os.environ)",
        "here = [f'/proc/self/fd/{fd}' for fd in os.listdir('/proc/self/fd')]",
        "files = [os.readlink(path) for path in here if os.path.exists(path)]",
        "print('ENV', [name for name in names if name.startswith(('VITRINE', 'RAY'))])",
        "print('FILES', [file for file in files if 'memfd' in file or 'ray' in file])",
        "pass",
    )
    assert "ENV []" in done.stdout, done.stderr[-2000:]
    assert "FILES []" in done.stdout


def test_jobs_draw_numbers_of_their_own(run):
    lines = "import random, numpy", "value = nnsight.save([float(torch.rand(1)), random.random(), numpy.random.rand()])"
    first, second = (run(*lines, "print('drawn', value)").stdout.rpartition("drawn ")[2] for _ in range(2))
    assert not set(json.loads(first)) & set(json.loads(second))


def test_a_failure_is_told_with_its_causes_whatever_it_says(run):
    done = run(
        "missing = {}",
        "try:",
        "    missing['missing']",
        "except KeyError as error:",
        "    raise RuntimeError('wrong \\udc80' + 'x' * 10_000_000) from error",
        "pass",
    )
    assert "KeyError: 'missing'" in done.stderr
    assert "direct cause" in done.stderr
    assert "RuntimeError: wrong ?" in done.stderr
    assert "characters are left out" in done.stderr
    assert len(done.stderr) < 200_000
    assert "execution.py" not in done.stderr


@pytest.mark.parametrize(
    ("setup", "line", "said"),
    [
        ("class Own: pass", "kept = nnsight.save(Own())", "the saved value 'kept' cannot be sent back"),
        ("class Own: found = {}\nown = Own()\nown.found = {}", "nnsight.save(own.found)", "own.found is saved, but"),
    ],
)
def test_a_value_that_cannot_come_back_is_named_with_its_line(run, setup, line, said):
    done = run("x = 1", line, "pass", setup=setup)
    assert said in done.stderr.splitlines()[-1]
    assert f'client0.py", line {12 + setup.count(chr(10))}: {line}' in done.stderr.splitlines()[-1]


def test_printing_without_end_is_cut(run):
    done = run("for i in range(100_000): print('line', i)", "value = nnsight.save(1)", "print(value)")
    assert "output limit reached" in done.stdout
    assert done.stdout.rstrip().endswith("1")
    assert done.stdout.count("LOG") < 20_000


def test_a_client_that_goes_takes_its_job_with_it(run, tmp_path, eventually):
    name, said = f"job{os.getpid()}", tmp_path / "said"
    said.touch()
    forked = [  # a process of its own, which has imported all already
        "import os",
        "if client := os.fork():",
        "    print('client', client)",
        "    raise SystemExit",
        f"sys.stdout = sys.stderr = open({str(said)!r}, 'w', buffering=1)",
        "os.dup2(sys.stdout.fileno(), 1)",
        "os.dup2(os.open(os.devnull, os.O_RDONLY), 0)",
    ]
    named = "import ctypes", f"ctypes.CDLL(None).prctl(15, b'{name}')"
    done = run(*named, "print('begins')", "while True: pass", "0", setup="\n".join(forked))
    client = int(done.stdout.split()[-1])
    try:
        eventually(said.read_text, lambda text: "begins" in text)
        assert is_running(name)
    finally:
        os.kill(client, signal.SIGKILL)
    eventually(lambda: not is_running(name), limit_s=8)


def is_running(name: str) -> bool:
    """Whether any thread has a name."""
    for path in Path("/proc").glob("[0-9]*/task/*/comm"):
        with contextlib.suppress(OSError):  # it has ended
            if path.read_text().strip() == name:
                return True
    return False


# ---- who may ask, and for what


def post(root: str, key: str, session: str = "", **headers: str) -> httpx.Response:
    data = {"data": json.dumps({"model_key": key, "session_id": session})}
    sent = {"nnsight-version": "0.8.1"} | headers
    return httpx.post(f"{root}/request", data=data, files={"blob": b"x"}, headers=sent, timeout=60)


def named(**key: object) -> str:
    return f"{CLASS}:{json.dumps({'repo_id': 'vitrine-demo', 'revision': None, 'task': 'text-generation'} | key)}"


@pytest.mark.parametrize(
    ("key", "status", "param"),
    [
        (named(repo_id="other/model"), 404, "model"),
        (named(repo_id="../../etc"), 404, "model"),
        (named(task="fill-mask"), 400, "model_key"),
        (named(more=1), 400, "model_key"),
        ("nnsight.modeling.vllm.VLLM:{}", 400, "model_key"),
        ("os.system:{}", 400, "model_key"),
        (f"{CLASS}:no json", 400, "model_key"),
        (f"{CLASS}:{'[' * 7000}", 400, "model_key"),
    ],
)
def test_a_model_that_is_not_served_is_refused_before_anything_is_opened(runs_code, key, status, param):
    answer = post(runs_code, key)
    assert answer.status_code == status
    assert answer.json()["error"]["param"] == param
    assert answer.json()["detail"] == answer.json()["error"]["message"]  # what nnsight shows


def test_pages_of_other_origins_run_nothing(runs_code):
    page = {"Origin": "http://evil.example", "Host": "evil.example:8000"}
    for headers in ({"Origin": page["Origin"]}, {"Host": page["Host"]}, page):
        answer = post(runs_code, named(), **headers)
        assert answer.status_code == 403
        assert answer.json()["error"]["code"] in ("origin_not_allowed", "host_not_allowed")
    unasked = httpx.post(f"{runs_code}/request", data={"data": "{}"}, files={"blob": b"x"}, timeout=60)
    assert unasked.status_code == 400  # what a form of another page can send
    assert unasked.json()["error"]["param"] == "nnsight-version"
    socket = f"ws{runs_code[4:]}/subscribe"
    with pytest.raises(websocket.WebSocketBadStatusException, match="403"):
        websocket.create_connection(socket, origin=page["Origin"])
    with pytest.raises(websocket.WebSocketBadStatusException, match="403"):
        websocket.create_connection(socket, host=page["Host"], origin=f"http://{page['Host']}")


@pytest.mark.parametrize("name", ["vitrine-demo", "Vitrine-Demo", str(WEIGHTS), f"{WEIGHTS}/"])
def test_a_model_goes_by_its_id_and_its_directory(runs_code, name):
    answer = post(runs_code, named(repo_id=name))
    assert answer.status_code == 200
    assert answer.json()["status"] == "RECEIVED"


def final(root: str, job_id: str, eventually) -> dict[str, str]:
    look = lambda: httpx.get(f"{root}/response/{job_id}", timeout=60).json()  # noqa: E731
    return eventually(look, fits=lambda told: told["status"] in ("COMPLETED", "ERROR"))


@pytest.mark.parametrize(
    ("key", "said"),
    [
        (named(revision="v2"), "the revision 'v2' is not served here"),
        (named(trust_remote_code=True), "without trust_remote_code"),
        (named(), "Error"),  # b"x" is no block
    ],
)
def test_a_job_that_cannot_be_run_ends_with_the_reason(runs_code, eventually, key, said):
    job_id = post(runs_code, key).json()["id"]
    assert said in final(runs_code, job_id, eventually)["description"]


@pytest.mark.long  # another replica; tests/serve_app/backend/test_models.py serves and names one
def test_a_model_with_an_adapter_is_run_where_it_is_served_with_that_adapter(served, runs_code, run):
    pytest.importorskip("peft")
    apart = lora(AutoModelForCausalLM.from_pretrained(WEIGHTS), served.home / "models/tests/lora")
    ids = AutoTokenizer.from_pretrained(WEIGHTS)("Ann has 3 boxes", return_tensors="pt").input_ids
    setup = f"model = TransformersModel(PATH, peft={str(served.home / 'models/tests/lora')!r}, **made)"
    lines = ("x = model.model.layers[1].self_attn.q_proj.output.sum().save()", "y = model.output.logits.sum().save()")
    program = (*lines, "print(float(x), float(y))")
    missing = run(*program, setup=setup).stderr.splitlines()[-1]
    assert "'vitrine-demo+tests/lora' is not served here; the served models are: 'vitrine-demo'" in missing
    loaded = {"model_id": "vitrine-demo", "adapter": "tests/lora"}
    assert httpx.post(f"{runs_code}/models/load", json=loaded, timeout=120).status_code == 200
    rows: list[torch.Tensor] = []
    apart.get_submodule("base_model.model.model.layers.1.self_attn.q_proj").register_forward_hook(
        lambda module, given, output: rows.append(output)
    )
    with torch.no_grad():
        expected = [float(apart(ids).logits.sum()), float(rows[0].sum())][::-1]
    said = run(*program, setup=setup)
    assert [float(number) for number in said.stdout.split()[-2:]] == pytest.approx(expected, rel=1e-3), said.stderr
    unloaded = {"model_id": "vitrine-demo+tests/lora"}
    assert httpx.post(f"{runs_code}/models/unload", json=unloaded, timeout=120).status_code == 200


def test_jobs_and_results_that_are_not_there_are_told_so(runs_code):
    nobody = "0" * 32
    assert httpx.get(f"{runs_code}/response/{nobody}", timeout=60).status_code == 410  # nnsight would wait after 404
    job_id = post(runs_code, named()).json()["id"]
    for name, token in ((nobody, "x"), (job_id, "x"), (job_id, "\u00e9")):
        answer = httpx.get(f"{runs_code}/response/{name}/result", params={"token": token}, timeout=60)
        assert answer.status_code == 404
    assert post(runs_code, named(), session=nobody).json()["error"]["code"] == "session_not_found"


def test_without_the_operators_leave_no_code_is_run(served):
    assert post(served.root, named()).json()["error"]["code"] == "client_code_off"
    for path in ("/status", "/env", "/whoami", "/response/x"):
        answer = httpx.get(served.root + path, timeout=60)
        assert answer.status_code == 403
        assert answer.json()["error"]["message"] == CODE_DISABLED
