"""What requests cost each other, in one process and without Ray: `python -m benchmarks.engine.company`.

Ratios of rates in tokens of prompts and answers a second, of two engines whose steps take turns: the median of the
rounds, the least and the largest.

  mixed lengths    half of 16 prompts of 32 tokens, half of 1,500, over 16 of 766
  shared           32 prompts that share a prefix of 1,000 tokens, over 32 that share nothing
  steered          a vector of its own for each of 32 requests at all layers and tokens, over none
  batch_invariant  the same bits beside any other sequences over plain: decoding, and prompts
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
from collections.abc import Callable, Sequence
from functools import partial

import torch

from benchmarks.common import measured_models
from benchmarks.common.sides import Side, ratio
from deployments.engine.edits import Edit
from deployments.engine.engine import Engine
from deployments.engine.request import Request
from deployments.model.model import Model

NAME = "random-40m"


def steered(model: Model, requests: Sequence[Request]) -> list[Request]:
    """The requests, each with a vector of its own at each layer; vectors are zeros, so that tokens are the same."""
    points = model.points.named("layers.*.output", "point")
    zeros = [torch.zeros(points[0].shape[0], device=model.device) for _ in requests]
    return [
        dataclasses.replace(one, edits=tuple(Edit(point, "add", vector=vector) for point in points))
        for one, vector in zip(requests, zeros, strict=True)
    ]


@torch.inference_mode()
def main() -> None:
    """Measure, and print one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--scale", type=int, default=1, help="divide all lengths and counts by so much")
    given = parser.parse_args()

    def build(batch_invariant: bool = False) -> Model:
        tokenizer = measured_models.tokenizer(NAME)
        return Model(measured_models.build(NAME), tokenizer, NAME, batch_invariant=batch_invariant)

    plain = build()
    engines, invariant = (Engine(plain), Engine(plain)), Engine(build(batch_invariant=True))
    random, scale = torch.Generator().manual_seed(0), given.scale

    def ids(length: int) -> list[int]:
        found: list[int] = torch.randint(3, 1000, (length,), generator=random).tolist()
        return found

    def of(count: int, lengths: Sequence[int], new: int, beginning: int = 0) -> list[Request]:
        """`count` requests whose prompts of random tokens have these lengths in turn, after a shared prefix."""
        some = [max(1, lengths[i % len(lengths)] // scale) for i in range(max(2, count // scale))]
        shared = ids(beginning // scale)
        return [Request("", [*shared, *ids(length)], max(1, new // scale), ignore_eos=True) for length in some]

    decoding, filling = partial(of, 32, [32], 64), partial(of, 8, [512], 1)
    cases: dict[str, tuple[Engine, Callable[[], list[Request]], Callable[[], list[Request]]]] = {
        "mixed lengths": (engines[0], lambda: of(16, [32, 1500], 64), lambda: of(16, [766], 64)),
        "shared": (engines[0], lambda: of(32, [32], 32, beginning=1000), lambda: of(32, [1032], 32)),
        "steered": (engines[0], lambda: steered(plain, decoding()), decoding),
        "batch_invariant, decoding": (invariant, decoding, decoding),
        "batch_invariant, prompts": (invariant, filling, filling),
    }
    found: dict[str, object] = {"model": NAME, "threads": torch.get_num_threads()}
    for title, (engine, ours, base) in cases.items():
        ratios = [ratio(Side(engine, ours()), Side(engines[1], base())) for _ in range(given.rounds)]
        found[title] = [round(statistics.median(ratios), 3), round(min(ratios), 3), round(max(ratios), 3)]
        print(title, found[title], flush=True)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
