"""Ways to collect activations, of short and of long prompts: `python -m benchmarks.activations.collecting`.

  script    a careful user's, with transformers: batches of prompts sorted by length, `output_hidden_states=True`, the
            wanted rows saved with safetensors and made durable
  engine    the engine in this process, which runs the prompts and records nothing
  collect   `deployments.collect --model`
  served    `deployments.collect --base-url`, at this project's server
  requests  one prompt a request to the same server, 32 in flight

They record the output of every layer (the script not of the last one, which transformers gives normalized): of the
last token of the beginnings of questions, and of all tokens of whole questions. Nothing is generated. Rates are prompt
tokens per second, from the first prompt to the last durable row; the model is loaded before.

Ends with 1 if a stored row differs from the script's by more than a thousandth of its length. In bfloat16, one row in a
hundred may differ by more than a tenth: rows of the script itself differ from those in float32 by up to 0.4 (SmolLM2).
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import numpy as np
import torch
from safetensors.torch import load_file, save_file

from benchmarks.common import questions, servers, settings
from benchmarks.common.children import output
from benchmarks.common.findings import Findings, parser_of
from benchmarks.common.measuring import Ratio, Run, Way
from benchmarks.common.served import exchanged
from benchmarks.common.servers import OWNER, Server
from benchmarks.common.work import Work
from benchmarks.ways import ours
from deployments.activations import load, runs
from deployments.activations.facts import NO_OWNER
from deployments.engine.engine import Engine
from deployments.interrupts import terminate_as_interrupt
from deployments.model.load import load as load_model
from deployments.model_files.names import source
from deployments.options import DEMO, SMOLLM2, home

WAYS = {
    "script": "script with transformers",
    "engine": "engine in process, no capture",
    "collect": "deployments.collect --model",
    "served": "deployments.collect --base-url",
    "requests": "one prompt a request",
}
RATIOS = [("collect", "script"), ("collect", "engine"), ("served", "engine"), ("requests", "engine")]
CASES = {"last": "short prompts, last token", "all": "long prompts, all tokens"}
SHORT = 50  # characters
BATCH = IN_FLIGHT = 32
POINTS = "layers.*.output"
NONE = Server("", "")
KV_BYTES = 1 << 30  # most of the engine here and of the server's
CLOSE = {"float32": (1.0, 1e-3), "bfloat16": (0.99, 0.1)}  # a quantile of all rows: at most this part of a row's length


class Script:
    """The script's model and tokenizer, by a name or directory and torch's name of a dtype."""

    def __init__(self, model: str, dtype: str) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self._tokenizer = AutoTokenizer.from_pretrained(source(model))
        self._tokenizer.pad_token = self._tokenizer.pad_token or self._tokenizer.eos_token
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._model = AutoModelForCausalLM.from_pretrained(source(model), dtype=dtype, device_map=device)

    @torch.inference_mode()
    def run(self, texts: list[str], tokens: str, directory: Path) -> Run:
        """Save the rows of each prompt's `last` token or of `all`: number of the prompt -> [layers, tokens, hidden]."""
        began, count = time.perf_counter(), 0
        ids = self._tokenizer(texts)["input_ids"]
        order = sorted(range(len(ids)), key=lambda index: len(ids[index]))
        for first in range(0, len(order), BATCH):
            batch = order[first : first + BATCH]
            lengths = [len(ids[index]) for index in batch]
            padded = self._tokenizer.pad(
                {"input_ids": [ids[index] for index in batch]}, padding_side="right", return_tensors="pt"
            ).to(self._model.device)
            # Without the head, whose logits nobody wants; with the layers' own outputs, not the last one normalized.
            states = self._model.model(**padded, output_hidden_states=True).hidden_states[1:-1]
            stacked = torch.stack(states, 1)  # [batch, layers, tokens, hidden]
            rows = {
                str(index): stacked[row, :, length - 1 if tokens == "last" else 0 : length].contiguous()
                for row, (index, length) in enumerate(zip(batch, lengths, strict=True))
            }
            path = directory / f"{first}.safetensors"
            save_file(rows, path)
            with path.open("rb") as written:
                os.fsync(written.fileno())
            count += sum(lengths)
        return Run([], count, time.perf_counter() - began)


@dataclass
class Case:
    """Prompts, and the tokens to record of each: `last` or `all`.

    Attributes:
        folder: Where the script's rows go, and the store of `deployments.collect --model`.
        sessions: Way -> the directory of its last turn's session.
    """

    texts: list[str]
    tokens: str
    folder: Path
    sessions: dict[str, Path] = field(default_factory=dict)

    def engine(self, running: Engine) -> Run:
        """Run the prompts and record nothing."""
        began = time.perf_counter()
        ids = questions.ids(running.model.tokenizer, self.texts)
        running.generate(ours.requests(running.model, Work(ids, 0)))
        return Run([], sum(map(len, ids)), time.perf_counter() - began)

    def collect(self, name: str, store: Path, options: list[str], server: Server = NONE) -> Run:
        """Run `deployments.collect` in a session of its own, and take its own account of its speed."""
        data = self.folder / "data.jsonl"
        data.write_text("".join(json.dumps({"id": i, "prompt": text}) + "\n" for i, text in enumerate(self.texts)))
        command = [sys.executable, "-m", "deployments.collect", str(data), f"--points={POINTS}", *options]
        command += [f"--tokens={self.tokens}", f"--session={self._session(name, store, server)}"]
        environment = {**os.environ, "RAY_ADDRESS": "local", "OPENAI_API_KEY": next(server.keys)}
        found = json.loads(output(command, environment).splitlines()[-1])
        return Run([], found["tokens"], found["seconds"])

    def requests(self, server: Server) -> Run:
        """Send a request for each prompt; RuntimeError if one is not stored."""
        common = {"model": server.model, "max_tokens": 0, "session_id": self._session("requests", server.store, server)}
        capture = {"points": [POINTS], "tokens": self.tokens, "mode": "trace"}
        bodies = [
            {**common, "prompt": text, "capture": capture | {"sample_id": str(i)}} for i, text in enumerate(self.texts)
        ]
        exchanges = exchanged(server, "completions", bodies, IN_FLIGHT)
        answers = [json.loads(exchange.body.encode("latin-1")) for exchange in exchanges]
        if lost := [one["activations_meta"] for one in answers if one["activations_meta"]["status"] != "stored"]:
            raise RuntimeError(f"not stored: {lost[0]}")
        tokens = sum(one["usage"]["prompt_tokens"] for one in answers)
        return Run([], tokens, max(exchange.end for exchange in exchanges))

    def differences(self, quantile: float) -> dict[str, float]:
        """Way -> distance of a row that it stored from the script's, over that row's length: a quantile of rows."""
        wanted = {name: rows for path in self.folder.glob("*.safetensors") for name, rows in load_file(path).items()}
        found = {}
        for name, session in self.sessions.items():
            stored = runs(session)
            assert len(stored) == len(self.texts), f"{name}: {len(stored)} runs"
            ratios = list[torch.Tensor]()
            for run in stored:
                rows = load(session, run.run_id)
                for layer, other in enumerate(wanted[str(run.sample_id)].float()):
                    distances = (rows[f"layers.{layer}.output"].float() - other).norm(dim=-1)  # [tokens]
                    ratios.append((distances / other.norm(dim=-1)).flatten())
            found[name] = float(np.quantile(torch.cat(ratios).numpy(), quantile))
        return found

    def _session(self, name: str, store: Path, server: Server) -> str:
        session = uuid.uuid4().hex
        if last := self.sessions.get(name):  # several are more than a disk may hold
            if server.root:
                headers = {"authorization": f"Bearer {next(server.keys)}"}
                url = f"{server.root}/v1/activations/session/{last.name}"
                httpx.delete(url, headers=headers, timeout=60).raise_for_status()
            else:
                shutil.rmtree(last)
        self.sessions[name] = store / (OWNER if server.root else NO_OWNER) / session
        return session


def measure(case: Case, findings: Findings, dtype: str, script: Script, running: Engine, server: Server) -> None:
    """Measure the ways asked for, and compare the rows that they stored last."""
    options, store = findings.options, case.folder / "store"
    loaded = [f"--model={options.model}", f"--store={store}"]
    loaded += [f"--set=dtype={dtype}", f"--set=threads={options.threads}"]
    turns: dict[str, Callable[[], Run]] = {
        "script": lambda: script.run(case.texts, case.tokens, case.folder),
        "engine": lambda: case.engine(running),
        "collect": lambda: case.collect("collect", store, loaded),
        "served": lambda: case.collect("served", server.store, [f"--base-url={server.root}"], server),
        "requests": lambda: case.requests(server),
    }
    title = f"{options.model}, {dtype}, {len(case.texts)} prompts"
    ways = [Way(WAYS[name], turns[name]) for name in options.way]
    wanted = [Ratio(WAYS[of], WAYS[to]) for of, to in RATIOS if {of, to} <= {*options.way}]
    findings.compare(title, CASES[case.tokens], ways, wanted, ways[0].name, options.rounds)
    quantile, close = CLOSE[dtype]
    for name, difference in (case.differences(quantile) if "script" in options.way else {}).items():
        most = f"{quantile:.0%} of the rows differ from the script's by up to {difference:.2g} of their length"
        print(f"{WAYS[name]}: {most}", flush=True)
        findings.add(title, f"{CASES[case.tokens]}, {quantile:.0%} of the rows of {WAYS[name]}", difference)
        if not difference < close:
            findings.failed.append(f"{title}: the rows of {WAYS[name]} differ by {difference:.2g}")


def main(arguments: list[str] | None = None) -> int:
    """Measure, print and write the results; gives the exit status."""
    terminate_as_interrupt()
    parser = parser_of(__doc__, "benchmark-collecting")
    parser.add_argument("--model", default=SMOLLM2 if (home() / "models" / SMOLLM2).is_dir() else DEMO)
    parser.add_argument("--dtype", choices=settings.DTYPES, action="append", help="again for more than one")
    parser.add_argument("--prompts", type=int, default=256, help="of GSM8K's questions if found, else those shipped")
    parser.add_argument("--tokens", choices=CASES, nargs="+", default=list(CASES))
    parser.add_argument("--way", choices=WAYS, nargs="+", default=list(WAYS))
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    findings, texts = Findings(options), questions.texts(questions.source(), options.prompts)
    for dtype in settings.dtypes(options):
        script = Script(options.model, dtype)
        running = Engine(load_model(source(options.model), dtype=dtype), kv_bytes=KV_BYTES)
        serving: AbstractContextManager[Server] = nullcontext(NONE)
        if {"served", "requests"} & {*options.way}:
            place = Path(source(options.model))
            chosen = [f"dtype={dtype}", f"threads={options.threads}", f"kv_bytes={KV_BYTES}"]
            serving = servers.vitrine(place, options=chosen)
        with serving as server:
            for tokens in options.tokens:
                with tempfile.TemporaryDirectory(prefix="vt-collecting-") as folder:
                    cut = [text[:SHORT] if tokens == "last" else text for text in texts]
                    measure(Case(cut, tokens, Path(folder)), findings, dtype, script, running, server)
    return findings.close()


if __name__ == "__main__":
    sys.exit(main())
