"""Compare the engine with transformers and nnsight, in one process without Ray.

All baselines generate from the same prompts with the same weights: the engine (plain, with the output of every layer
recorded in memory, with a steering vector per request), transformers' `generate` on one static batch, its continuous
batching (plain, with hooks that clone every layer's output), and nnsight.

The exit status is 1 if greedy float32 tokens differ, or if `generate`'s static batch is faster than the engine.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from benchmarks import ways
from benchmarks.common import measured_models
from benchmarks.common.harness import DTYPES, Findings, in_turn, parser
from deployments.engine.engine import Engine
from deployments.model.model import Model
from deployments.options import Options

ENGINE, CAPTURING, STEERED = "engine", "engine, all layers captured", "engine, steered"
STATIC, BATCH = "generate, one static batch", "generate_batch"
STATIC_CAPTURING, BATCH_CAPTURING = f"{STATIC}, hooks clone all layers", f"{BATCH}, hooks clone all layers"
NNSIGHT = "nnsight, one static batch, all layers cached"
RATIOS = {
    (ENGINE, STATIC): 1.0,
    (ENGINE, BATCH): None,
    (CAPTURING, ENGINE): None,
    (STEERED, ENGINE): None,
    **dict.fromkeys((CAPTURING, peer) for peer in (STATIC_CAPTURING, BATCH_CAPTURING, NNSIGHT)),
}


def main(arguments: list[str] | None = None) -> int:
    """Measure, print and write the results; gives the exit status."""
    parsing = parser(__doc__, "benchmark-engine")
    ways.add_options(parsing)
    parsing.add_argument("--device", default="cpu", help="cpu, cuda or a torch device")
    options = parsing.parse_args(arguments)
    torch.set_num_threads(options.threads)
    tokenizer = measured_models.tokenizer(options.model)
    prompts = [tokenizer(text)["input_ids"] for text in ways.questions(options.requests)]
    work = ways.Work(prompts, options.new_tokens, options.device)

    def hf() -> Any:
        return measured_models.build(options.model, DTYPES[options.dtype], options.device)

    model, memory = Model(hf(), tokenizer, options.model), Options().capture_memory_bytes  # as a server has it
    running, plain = Engine(model, max_running=options.requests, capture_bytes=memory), hf()
    measured = in_turn(
        [
            ways.engine(running, work, ENGINE),
            ways.engine(running, work, CAPTURING, ways.LAYERS),
            ways.engine_steered(running, work, STEERED),
            ways.static_generate(plain, work, STATIC),
            ways.static_generate(plain, work, STATIC_CAPTURING, capture=True),
            ways.generate_batch(plain, work, BATCH),
            ways.generate_batch(plain, work, BATCH_CAPTURING, capture=True),
            ways.nnsight_generate(hf(), tokenizer, work, NNSIGHT),  # it instruments the model that it is given
        ],
        options.rounds,
    )
    findings, title = Findings(options), f"{options.model}, {options.dtype}, {options.device}"
    findings.add(title, measured, RATIOS)
    if options.dtype == "float32":
        wanted = measured[ENGINE][0].outputs
        differing = [name for name, runs in measured.items() if runs[0].outputs != wanted]
        findings.failed += [f"{title}: greedy outputs of {name} differ" for name in differing]
    return findings.close()


if __name__ == "__main__":
    sys.exit(main())
