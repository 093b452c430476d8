"""Collecting activations compared with a script for transformers: `python -m benchmarks.activations.collecting`.

Both run `--prompts` through the model and record the output of every layer (the script not of the last one, which
transformers gives normalized), of each prompt's last token and of all of its tokens. The script is the one that a
careful user writes: batches of prompts sorted by length, `output_hidden_states=True`, the wanted rows saved with
safetensors and made durable. Both are timed from the first prompt, model loaded, to the last durable row. Rates are of
prompt tokens.

Before that, both record all tokens of some prompts in float32, and the rows are compared: in bfloat16 they differ with
the batch's make-up. Ends with 1 where they differ by more than a thousandth of a row's length.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from benchmarks.common import questions
from benchmarks.common.children import ROOT
from benchmarks.common.findings import Findings
from benchmarks.common.measuring import Ratio, Run, Way
from deployments.activations import load, runs
from deployments.interrupts import terminate_as_interrupt
from deployments.model_files.names import source
from deployments.options import DEMO, SMOLLM2, home

SCRIPT, COLLECT = "script with transformers", "deployments.collect"
BATCH = 32
COMPARED = 32  # prompts
CLOSE = 1e-3  # of a row's length, in float32


class Script:
    """The script: transformers over batches sorted by length, rows saved with safetensors.

    Args:
        model: A name or directory.
        texts: The prompts.
        tokens: `last` or `all`, the rows of each prompt that are saved.
        directory: Where the files go.
        dtype: Of the weights, as torch names it.
    """

    def __init__(self, model: str, texts: list[str], tokens: str, directory: Path, dtype: str = "auto") -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        place = source(model)
        self._tokenizer = AutoTokenizer.from_pretrained(place)
        self._tokenizer.pad_token = self._tokenizer.pad_token or self._tokenizer.eos_token
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._model = AutoModelForCausalLM.from_pretrained(place, dtype=dtype, device_map=device)  # in eval mode
        self._texts, self._tokens, self._directory = texts, tokens, directory

    @torch.inference_mode()
    def run(self) -> Run:
        """Record all prompts once."""
        began, count = time.perf_counter(), 0
        ids = self._tokenizer(self._texts)["input_ids"]
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
                str(index): (
                    stacked[row, :, length - 1 : length] if self._tokens == "last" else stacked[row, :, :length]
                )
                for row, (index, length) in enumerate(zip(batch, lengths, strict=True))
            }
            path = self._directory / f"{first}.safetensors"
            save_file({name: value.contiguous() for name, value in rows.items()}, path)
            with path.open("rb") as written:
                os.fsync(written.fileno())
            count += sum(lengths)
        return Run([], count, time.perf_counter() - began)

    def rows(self) -> dict[str, torch.Tensor]:
        """What the last run saved: prompt -> [layers, tokens, hidden]."""
        return {name: rows for path in self._directory.iterdir() for name, rows in load_file(path).items()}


class Collect:
    """`python -m deployments.collect` over the same prompts; arguments as for `Script`."""

    def __init__(self, model: str, texts: list[str], tokens: str, directory: Path, dtype: str = "auto") -> None:
        self._data, self._store = directory / "data.jsonl", directory / "store"
        self._data.write_text(
            "".join(json.dumps({"id": index, "prompt": text}) + "\n" for index, text in enumerate(texts))
        )
        self._session = ""
        self._command = [sys.executable, "-m", "deployments.collect", str(self._data), f"--model={model}"]
        self._command += [
            "--points=layers.*.output",
            f"--tokens={tokens}",
            f"--store={self._store}",
            f"--set=dtype={dtype}",
        ]

    def run(self) -> Run:
        """Record all prompts once, in a session of their own."""
        self._session = uuid.uuid4().hex
        command = [*self._command, f"--session={self._session}"]
        environment = {**os.environ, "RAY_ADDRESS": "local"}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"deployments.collect ended with {done.returncode}:\n{done.stdout}{done.stderr}")
        found = json.loads(done.stdout.splitlines()[-1])
        return Run([], found["tokens"], found["seconds"])

    def difference(self, wanted: dict[str, torch.Tensor]) -> float:
        """The largest distance of a stored row from the script's, over that row's length."""
        largest = 0.0
        session = self._store / self._session
        for run in runs(session):
            stored, rows = load(session, run.run_id), wanted[str(run.sample_id)].float()
            for layer, other in enumerate(rows):
                distances = (stored[f"layers.{layer}.output"].float() - other).norm(dim=-1)  # [tokens]
                largest = max(largest, float((distances / other.norm(dim=-1)).max()))
        return largest


def main(arguments: list[str] | None = None) -> int:
    """Measure, show, keep."""
    terminate_as_interrupt()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=SMOLLM2 if (home() / "models" / SMOLLM2).is_dir() else DEMO)
    parser.add_argument("--prompts", type=int, default=256, help="of GSM8K's questions if found, else those shipped")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", choices=("last", "all"), nargs="+", default=("last", "all"))
    results = Path("results") / "benchmark-collecting"
    parser.add_argument("--results", type=Path, default=results, help="without a suffix")
    options = parser.parse_args(arguments)
    options.threads = torch.get_num_threads()
    findings, texts = Findings(options), questions.texts(questions.source(), options.prompts)
    compare(findings, options.model, texts[:COMPARED])
    for tokens in options.tokens:
        measure(findings, options, texts, tokens)
    return findings.close()


@contextmanager
def both(model: str, texts: list[str], tokens: str, dtype: str) -> Iterator[tuple[Script, Collect]]:
    """Both ways, with directories for as long as the block runs."""
    with tempfile.TemporaryDirectory(prefix="vt-collecting-") as place:
        folders = Path(place, "script"), Path(place, "collect")
        for folder in folders:
            folder.mkdir()
        yield Script(model, texts, tokens, folders[0], dtype), Collect(model, texts, tokens, folders[1], dtype)


def compare(findings: Findings, model: str, texts: list[str]) -> None:
    """Compare what both record of some prompts."""
    with both(model, texts, "all", "float32") as (script, collect):
        script.run()
        collect.run()
        difference = collect.difference(script.rows())
    title = f"{model}, {len(texts)} prompts in float32"
    findings.add(title, "largest difference", difference)
    print(f"largest distance from the script's rows: {difference:.2g} of a row's length", flush=True)
    if not difference < CLOSE:
        findings.failed.append(f"{title}: the rows differ by {difference:.2g}")


def measure(findings: Findings, options: Any, texts: list[str], tokens: str) -> None:
    """Measure both ways of one choice of tokens."""
    title = f"{options.model}, {len(texts)} prompts"
    with both(options.model, texts, tokens, "auto") as (script, collect):
        ways = [Way(SCRIPT, script.run), Way(COLLECT, collect.run)]
        findings.compare(title, f"rows of {tokens} tokens", ways, [Ratio(COLLECT, SCRIPT)], SCRIPT, options.rounds)


if __name__ == "__main__":
    sys.exit(main())
