"""Compare methods of collecting activations, for short and long prompts.

  script    an efficient script with transformers: batches of prompts sorted by length, `output_hidden_states=True`,
            the chosen vectors saved with safetensors and synced to disk
  engine    the engine in this process, which runs the prompts and records nothing
  collect   `deployments.collect --model`
  served    `deployments.collect --base-url`, with this project's server, which runs the entire time

They record the output of every layer (the script omits the last, which transformers normalizes): at the last token of
the first characters of questions, and at all tokens of full questions. Nothing is generated. Rates are prompt tokens
per second, from the first prompt to the last durable vector, without loading the model.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import httpx
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import vitrine
from benchmarks import ways
from benchmarks.common.harness import DTYPES, Findings, Run, Way, in_turn, parser
from deployments.engine.engine import Engine
from deployments.interrupts import terminate_as_interrupt
from deployments.model.load import load
from deployments.model_files.names import source
from deployments.options import DEMO, SMOLLM2, home

SCRIPT, ENGINE, COLLECT, SERVED = "script", "engine", "collect", "served"
RATIOS = [(COLLECT, SCRIPT), (COLLECT, ENGINE), (SERVED, SCRIPT), (SERVED, ENGINE)]
CASES = {"last": "short prompts, last token", "all": "long prompts, all tokens"}
SHORT = 50  # characters
BATCH = 32
KV_BYTES = 1 << 30  # most of the engine here and of the server's
SESSION = "measured"


class Script:
    """The script's model and tokenizer, by a name or directory and torch's name of a dtype."""

    def __init__(self, model: str, dtype: str) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(source(model))
        self._tokenizer.pad_token = self._tokenizer.pad_token or self._tokenizer.eos_token
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._model = AutoModelForCausalLM.from_pretrained(source(model), dtype=dtype, device_map=device)

    @torch.inference_mode()
    def run(self, texts: Sequence[str], tokens: str, directory: Path) -> Run:
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
        return Run(count, time.perf_counter() - began)


def ways_of(
    options: argparse.Namespace, tokens: str, folder: Path, script: Script, running: Engine, url: str
) -> list[Way]:
    """All ways of recording the `last` tokens or `all`; each turn has new prompts, and its rows are deleted."""

    def texts() -> list[str]:
        return [text[: SHORT if tokens == "last" else None] for text in ways.questions(options.prompts)]

    def engine() -> Run:
        began = time.perf_counter()
        ids = running.model.tokenizer(texts())["input_ids"]
        ways.engine(running, ways.Work(ids, 0), ENGINE).run()
        return Run(sum(map(len, ids)), time.perf_counter() - began)

    def collect(*given: str) -> Run:
        data = folder / "data.jsonl"
        data.write_text("".join(json.dumps({"id": i, "prompt": text}) + "\n" for i, text in enumerate(texts())))
        command = [sys.executable, "-m", "deployments.collect", str(data), "--points=layers.*.output", *given]
        command += [f"--tokens={tokens}", f"--session={SESSION}"]
        env = {**os.environ, "RAY_ADDRESS": "local"}
        done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True)
        found = json.loads(done.stdout.splitlines()[-1])  # its own account of its speed
        return Run(found["tokens"], found["seconds"])

    def loading() -> Run:
        settings = [f"--set=dtype={options.dtype}", f"--set=threads={options.threads}"]
        run = collect(f"--model={options.model}", f"--store={folder / 'store'}", *settings)
        shutil.rmtree(folder / "store")
        return run

    def served() -> Run:
        run = collect(f"--base-url={url}")
        httpx.delete(f"{url}/v1/activations/session/{SESSION}", timeout=60).raise_for_status()
        return run

    scripted = Way(SCRIPT, lambda: script.run(texts(), tokens, folder))
    return [scripted, Way(ENGINE, engine), Way(COLLECT, loading), Way(SERVED, served)]


def main(arguments: list[str] | None = None) -> int:
    """Measure, print and write the results; gives the exit status."""
    terminate_as_interrupt()
    parsing = parser(__doc__, "benchmark-collecting")
    parsing.add_argument("--model", default=SMOLLM2 if (home() / "models" / SMOLLM2).is_dir() else DEMO)
    parsing.add_argument("--dtype", choices=DTYPES, default="float32")
    parsing.add_argument("--prompts", type=int, default=256)
    options = parsing.parse_args(arguments)
    torch.set_num_threads(options.threads)
    findings, script = Findings(options), Script(options.model, options.dtype)
    running = Engine(load(source(options.model), dtype=options.dtype), kv_bytes=KV_BYTES)
    settings = {"dtype": options.dtype, "threads": options.threads, "kv_fraction": f"{KV_BYTES}B"}
    with (
        tempfile.TemporaryDirectory(prefix="vt-collecting-") as name,
        vitrine.serve(options.model, activations_dir=f"{name}/served", **settings) as server,
    ):
        for tokens, title in CASES.items():
            measured = in_turn(ways_of(options, tokens, Path(name), script, running, server.url), options.rounds)
            findings.add(f"{options.model}, {options.dtype}, {title}", measured, dict.fromkeys(RATIOS))
    return findings.close()


if __name__ == "__main__":
    sys.exit(main())
