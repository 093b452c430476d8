"""Compare a server with the engine in process, `transformers serve` and vLLM, on a CPU.

In each round, the engine and `generate` run while no server does. Then the benchmark starts each server, sends complete
and streamed requests, and stops it, because an idle server takes cores from the others. The first run installs vLLM
below build/, which takes minutes and 3.4 GB; vLLM serves models whose head size is at least 32.
"""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks import ways
from benchmarks.common import measured_models
from benchmarks.common.harness import DTYPES, Findings, Run, Way, in_turn, parser
from benchmarks.common.load import sent
from benchmarks.common.servers import SERVERS, Server
from deployments.engine.engine import Engine
from deployments.interrupts import terminate_as_interrupt
from deployments.model.model import Model

ENGINE, STATIC = "engine in process", "generate, one static batch"
OURS, *PEERS = SERVERS
WHOLE, STREAMED, STORED = f"{OURS}, whole", f"{OURS}, streamed", f"{OURS}, whole, all layers stored"
KINDS: dict[str, dict[str, Any]] = {"whole": {}, "streamed": {"stream": True}}
CAPTURE = {"session_id": "measured", "capture": {"points": ["layers.*.output"]}}
ENDED = re.compile(r'"finish_reason": ?"length"')  # in a whole answer, and in a stream's last event


def served(name: str, server: Server, requests: int, new_tokens: int, **fields: Any) -> Way:
    """A server's completions of so many prompts at once, with further fields of every body."""
    common = {"model": server.model, "max_tokens": new_tokens, "temperature": 0, **server.fields, **fields}

    def run() -> Run:
        bodies = [{**common, "prompt": text} for text in ways.questions(requests)]
        seconds, answers = sent(f"{server.url}/v1/completions", bodies)
        if short := [answer for answer in answers if not ENDED.search(answer)]:
            raise RuntimeError(f"{name}: an answer ended before its length: {short[0][-500:]}")
        return Run(requests * new_tokens, seconds)

    return Way(name, run)


def main(arguments: list[str] | None = None) -> int:
    """Measure, print and write the results; gives the exit status."""
    terminate_as_interrupt()
    parsing = parser(__doc__, "benchmark-serving", rounds=3)
    ways.add_options(parsing)
    parsing.add_argument("--beside", nargs="*", choices=PEERS, default=PEERS, help="servers to compare with")
    options = parsing.parse_args(arguments)
    torch.set_num_threads(options.threads)
    tokenizer, dtype = measured_models.tokenizer(options.model), DTYPES[options.dtype]
    work = ways.Work([tokenizer(text)["input_ids"] for text in ways.questions(options.requests)], options.new_tokens)
    running = Engine(Model(measured_models.build(options.model, dtype), tokenizer, options.model))
    plain = measured_models.build(options.model, dtype)
    alone = [ways.engine(running, work, ENGINE), ways.static_generate(plain, work, STATIC)]
    measured: dict[str, list[Run]] = {}
    with tempfile.TemporaryDirectory(prefix="vt-model-") as place:
        measured_models.save(options.model, Path(place), dtype)
        for _ in range(options.rounds):
            turn = in_turn(alone, 1)
            for name in (OURS, *options.beside):
                with SERVERS[name](Path(place), options.threads) as server:
                    asked = {f"{name}, {kind}": fields for kind, fields in KINDS.items()}
                    asked |= {STORED: CAPTURE} if name == OURS else {}
                    size = options.requests, options.new_tokens
                    turn |= in_turn([served(way, server, *size, **fields) for way, fields in asked.items()], 1)
            for way, runs in turn.items():
                measured.setdefault(way, []).extend(runs)
    findings = Findings(options)
    ratios = [(WHOLE, ENGINE), (STREAMED, ENGINE), (STORED, WHOLE), (WHOLE, STATIC)]
    ratios += [(f"{OURS}, {kind}", f"{name}, {kind}") for name in options.beside for kind in KINDS]
    findings.add(f"{options.model}, {options.dtype}", measured, dict.fromkeys(ratios))
    return findings.close()


if __name__ == "__main__":
    sys.exit(main())
