"""A patch grid and a sweep by the client, and by the engine: `python -m benchmarks.serving.experiments`.

The grid patches every layer's output at each of a prompt's tokens, one forward each. The sweep generates 16 tokens with
a vector added at every other layer, with each of five scales. The client uses its own server over HTTP. The engine in
this process gets the same requests, tokenized, with their rows and vectors. Both are timed in turn, in float32, while
the other is idle. Rates are forwards per second for the grid, and generated tokens per second for the sweep.

Ends with 1 if the client's grid takes over 1.3 times as long as the engine's, or if their results differ.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import vitrine
from benchmarks.common.findings import Findings, parser_of
from benchmarks.common.measuring import Ratio, Run, Way
from deployments.engine.edits import Edit
from deployments.engine.engine import Engine
from deployments.engine.request import LensLayers, Request
from deployments.interrupts import terminate_as_interrupt
from deployments.model.load import load
from deployments.model_files.names import source
from deployments.options import DEMO, SMOLLM2, home
from deployments.places.place import Point
from deployments.points.capture import Capture
from deployments.points.token_choices import Tokens

CLIENT, ENGINE = "the client", "the engine in process"
CLEAN = "Tom has 3 boxes of pens and each box has 4 pens. Tom has 3 x"
CORRUPT = "Tom has 5 boxes of pens and each box has 7 pens. Tom has 5 x"
TARGET = " pens"
NEW_TOKENS, SCALES = 16, (-2.0, -1.0, 0.0, 1.0, 2.0)
MOST_RATIO = 1.3  # times as long
CLOSE = 1e-3  # between logprobs in float32


class Both:
    """A server with its client, and an engine in this process, of one model in float32."""

    def __init__(self, server: vitrine.Server, engine: Engine) -> None:
        self.server, self.engine = server, engine
        self.points = engine.model.points.named("layers.*.output", "point")
        self.target = int(self._ids(TARGET)[0])
        clean, self._corrupt = self._ids(CLEAN), self._ids(CORRUPT)
        capture = Capture(points=["layers.*.output"])
        (done,) = engine.generate([Request("clean", clean, 0, capture=capture, points=tuple(self.points))])
        assert done.captured
        self._rows: dict[str, Any] = done.captured.values  # point -> [tokens, hidden]
        self.tokens = len(clean)
        self.direction = vitrine.Direction(
            np.stack([self._rows[point.name][-1].numpy() for point in self.points]),
            [point.name for point in self.points],
        )

    def grid_by_client(self) -> tuple[int, Any]:
        """The number of forwards, and the target's logprobs [tokens, layers]."""
        values = self.server.patch_grid(CLEAN, CORRUPT, target=TARGET).values.T
        return values.size, values

    def grid_by_engine(self) -> tuple[int, Any]:
        """The same as `grid_by_client`."""
        last = Tokens(self.tokens - 1, self.tokens)
        lens = LensLayers((len(self.points) - 1,), (self.points[-1],), 0, (self.target,), last)
        done = self.engine.generate(
            Request(f"{point.name} {at}", self._corrupt, 0, edits=(self._patch(point, at),), lens=lens)
            for at in range(self.tokens)
            for point in self.points
        )
        found = [one.prompt_lens[0][1][0].targets[0][1] for one in done]
        return len(done), np.array(found).reshape(self.tokens, len(self.points))

    def sweep_by_client(self) -> tuple[int, Any]:
        """The number of generated tokens, and each layer's and scale's text."""
        swept = self.server.sweep(
            CLEAN, self.direction, layers=self._layers, scales=SCALES, max_tokens=NEW_TOKENS, ignore_eos=True
        )
        return NEW_TOKENS * len(swept.rows), [row.text for row in swept.rows]

    def sweep_by_engine(self) -> tuple[int, Any]:
        """The same as `sweep_by_client`."""
        prompt = self._ids(CLEAN)
        done = self.engine.generate(
            Request(f"{layer} {scale}", prompt, NEW_TOKENS, edits=self._steer(layer, scale), ignore_eos=True)
            for layer in self._layers
            for scale in SCALES
        )
        texts = [self.engine.model.tokenizer.decode(one.tokens, skip_special_tokens=True) for one in done]
        return sum(len(one.tokens) for one in done), texts

    @property
    def _layers(self) -> range:
        return range(0, len(self.points), 2)

    def _patch(self, point: Point, at: int) -> Edit:
        return Edit(point, "replace", Tokens(at, at + 1), vector=self._rows[point.name][at])

    def _steer(self, layer: int, scale: float) -> tuple[Edit, ...]:
        vector = scale * torch.from_numpy(self.direction.values[layer])
        return (Edit(self.points[layer], "add", vector=vector),) if scale else ()

    def _ids(self, text: str) -> list[int]:
        return list(self.engine.model.tokenizer(text)["input_ids"])


def main(arguments: list[str] | None = None) -> int:
    """Measure, print and write the results; gives the exit status."""
    terminate_as_interrupt()
    parser = parser_of(__doc__, "benchmark-experiments")
    parser.add_argument("--model", default=SMOLLM2 if (home() / "models" / SMOLLM2).is_dir() else DEMO)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    findings = Findings(options, unit="forwards or tokens/s")
    engine = Engine(load(source(options.model), dtype="float32", device="cpu"))
    with vitrine.serve(options.model, dtype="float32") as server:
        both = Both(server, engine)
        for part, client, own in (
            (f"patch grid, {len(both.points)} layers x {both.tokens} tokens", both.grid_by_client, both.grid_by_engine),
            (f"sweep, {NEW_TOKENS} new tokens", both.sweep_by_client, both.sweep_by_engine),
        ):
            ways = [Way(CLIENT, _timed(client)), Way(ENGINE, _timed(own))]
            found = findings.compare(options.model, part, ways, [Ratio(ENGINE, CLIENT)], ENGINE, options.rounds)
            findings.failed += _failures(part, found[f"{ENGINE} / {CLIENT}"].median, client()[1], own()[1])
    return findings.close()


def _timed(work: Callable[[], tuple[int, Any]]) -> Callable[[], Run]:
    def run() -> Run:
        began = time.perf_counter()
        count, _ = work()
        return Run([], count, time.perf_counter() - began)

    return run


def _failures(part: str, times: float, found: Any, wanted: Any) -> list[str]:
    """What is wrong with a part: it takes too long, or finds other numbers or texts than the engine."""
    failed = [f"{part}: the client takes {times:.2f} times as long"] if times > MOST_RATIO else []
    same = np.allclose(found, wanted, atol=CLOSE) if isinstance(wanted, np.ndarray) else found == wanted
    return failed if same else [*failed, f"{part}: the client finds other values than the engine"]


if __name__ == "__main__":
    sys.exit(main())
