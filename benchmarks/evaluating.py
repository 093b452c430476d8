"""The evaluator beside the load generator of the serving benchmark: `python -m benchmarks.evaluating`.

Both send the same bodies to this project's server, which serves the model that ships or that of `--weights`,
`--requests` at a time, without and with activations collected. The evaluator's tokens per second are those that its
summary says, the generator's are taken from the first request's start to the last answer's end, each in a process of
its own.

Ends with 1 where the evaluator makes less than 0.95 of the generator's tokens per second, or where their texts differ.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import uuid
from pathlib import Path
from typing import Any

from benchmarks.common import servers
from benchmarks.common.children import output
from benchmarks.common.findings import Findings, parser_of
from benchmarks.common.measuring import Ratio, Run, Way
from benchmarks.common.served import exchanged
from benchmarks.common.servers import Server
from deployments.demo_model import PROBLEMS, WEIGHTS
from deployments.interrupts import terminate_as_interrupt
from deployments.options import DEMO
from evals.config import CONTROL, Config
from evals.task.problems import to_problem
from evals.task.prompts import Prompts
from evals.task.trajectory import request_body

MIN_RATIO = 0.95
LOAD, EVALUATOR = "load generator", "evaluator"
LOAD_CAPTURED, EVALUATOR_CAPTURED = "load generator, activations stored", "evaluator, activations collected"
RATIOS = [Ratio(EVALUATOR, LOAD), Ratio(EVALUATOR_CAPTURED, LOAD_CAPTURED)]


def evaluator(name: str, server: Server, options: argparse.Namespace, directory: Path, captured: bool) -> Way:
    """A way of generating through the evaluator, by its own account of its speed; its results go to `directory`."""

    def run() -> Run:
        results = directory / uuid.uuid4().hex
        command = [sys.executable, "-m", "evals.gsm8k", f"--base-url={server.root}/v1", f"--results-dir={results}"]
        command += ["--dataset=demo", f"--samples={options.problems}", f"--parallel={options.requests}"]
        command += ["--mode=no-tools", f"--max-tokens={options.new_tokens}", "--temperature=0"]
        command += ["--collect-activations"] if captured else []
        output(command, {**server.env, "OPENAI_API_KEY": next(server.keys)})
        (mode,) = json.loads((results / "summary.json").read_text())["modes"].values()
        records = [json.loads(path.read_text()) for path in sorted((results / "samples").glob("*.json"))]
        return Run([record["completion"] for record in records], mode["completion_tokens"], mode["wall_s"])

    return Way(name, run)


def load(name: str, server: Server, options: argparse.Namespace, captured: bool) -> Way:
    """A way of generating through the load generator, with the bodies that the evaluator sends."""

    def run() -> Run:
        ids, bodies = asked(server.model, options, captured)
        exchanges = exchanged(server, "chat/completions", bodies, options.requests)
        answers = [json.loads(exchange.body.encode("latin-1")) for exchange in exchanges]
        texts = {id: answer["choices"][0]["message"]["content"] for id, answer in zip(ids, answers, strict=True)}
        tokens = sum(answer["usage"]["completion_tokens"] for answer in answers)
        # As the evaluator names its samples' files.
        return Run([texts[id] for id in sorted(texts)], tokens, max(exchange.end for exchange in exchanges))

    return Way(name, run)


def asked(model: str, options: argparse.Namespace, captured: bool) -> tuple[list[str], list[dict[str, Any]]]:
    """The ids of the first problems that ship, and the bodies that ask them."""
    chosen = {"model": model, "max_tokens": options.new_tokens, "collect_activations": captured}
    config = Config.model_validate(chosen | {"session_id": f"load-{uuid.uuid4().hex}", "results_dir": "unused"})
    prompts = Prompts(config.variants)
    ids, bodies = [], []
    for line in PROBLEMS.read_text().splitlines()[: options.problems]:
        problem = to_problem(json.loads(line))
        tags = {"mode": "no-tools", "variant": CONTROL, "eval": "gsm8k", "turn": "0"}
        messages = prompts.messages(problem.question, CONTROL)
        bodies.append(request_body(messages, "no-tools", {"sample_id": problem.id, "tags": tags}, config))
        ids.append(problem.id)
    return ids, bodies


def main(arguments: list[str] | None = None) -> int:
    """Measure, print and write the results; gives the exit status."""
    terminate_as_interrupt()
    parser = parser_of(__doc__, "benchmark-evaluating")
    parser.add_argument("--requests", type=int, default=32, help="how many at once")
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--problems", type=int, default=200, help="of those that ship, in each turn")
    parser.add_argument("--weights", type=Path, default=WEIGHTS, help="a model's directory, if not the one that ships")
    options = parser.parse_args(arguments)
    findings, title = Findings(options), f"{DEMO if options.weights == WEIGHTS else options.weights.name}, float32"
    served = servers.vitrine(options.weights, options=["dtype=float32"])
    with tempfile.TemporaryDirectory(prefix="vt-evals-") as place, served as server:
        directory = Path(place)
        ways = [
            load(LOAD, server, options, captured=False),
            evaluator(EVALUATOR, server, options, directory, captured=False),
            load(LOAD_CAPTURED, server, options, captured=True),
            evaluator(EVALUATOR_CAPTURED, server, options, directory, captured=True),
        ]
        findings.compare(title, "ways", ways, RATIOS, LOAD, options.rounds)
    findings.require(title, "ways", RATIOS, MIN_RATIO)
    return findings.close()


if __name__ == "__main__":
    sys.exit(main())
