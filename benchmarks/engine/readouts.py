"""The cost of readouts, in one process and without Ray: `python -m benchmarks.engine.readouts [MODEL]`.

Ratios of the rates with readouts to those without, whose steps take turns: the median of the rounds, the least and the
largest. Beside them, the time that a sparse autoencoder takes beyond that of its product. MODEL is a directory; without
it, random weights of 40M parameters in float32.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import time
from collections.abc import Callable

import torch

from benchmarks.common import measured_models
from benchmarks.common.sides import Side, ratio
from deployments.engine.edits import Edit
from deployments.engine.engine import Engine
from deployments.engine.request import Request
from deployments.model.load import load
from deployments.model.model import Model
from deployments.points.token_choices import Tokens
from deployments.readouts.files import Definition
from deployments.readouts.gates import Gate, Source
from deployments.readouts.sequence import ResolvedReadout
from deployments.readouts.spec import Condition, ReadoutSpec
from deployments.readouts.values import Readout, largest

FEATURES, TOP_K, PROMPT = 16384, 10, 48


def source(model: Model, layer: int, seed: int, features: int = 0) -> Source:
    """A readout of random weights at a layer's output: a probe, or an autoencoder of so many features."""
    (point,) = model.points.named(f"layers.{layer}.output", "point")
    hidden = point.shape[0]
    random = torch.Generator().manual_seed(seed)
    tensors = {"weight": torch.randn(1, hidden, generator=random), "bias": torch.zeros(1)}
    if features:
        encoder = torch.randn(hidden, features, generator=random) / hidden**0.5
        tensors = {"W_enc": encoder, "W_dec": encoder.T.contiguous()}
        tensors |= {"b_enc": torch.zeros(features), "b_dec": torch.zeros(hidden)}
    kind, activation = ("sae", "relu") if features else ("linear", "sigmoid")
    fields = {"name": f"r{seed}", "model": "m", "point": point.name, "kind": kind, "activation": activation}
    spec = ReadoutSpec.model_validate(fields)
    readout = Readout(Definition(spec, tensors, hidden, features or 1), model.device)
    return Source(readout, point.place, spec.name)


class Cases:
    """The requests of each case, made anew for each run: gates and edits have a state."""

    def __init__(self, model: Model, count: int, new: int) -> None:
        self._model, self._count, self._new = model, count, new
        layers = model.points.layer_count
        self._middle = layers // 2
        self._probe = source(model, self._middle, 0)
        self._probes = [source(model, (i % 8) * layers // 8, i + 1) for i in range(count)]
        self._sae = source(model, self._middle, 99, FEATURES)
        (self._point,) = model.points.named(f"layers.{min(self._middle + 1, layers - 1)}.output", "point")
        self._vector = torch.zeros(self._point.shape[0], device=model.device)

    def made(self, streamed: bool = False) -> list[Request]:
        """Requests without readouts, with prompts of 48 random tokens."""
        numbers = torch.Generator().manual_seed(0)
        prompts = torch.randint(3, 1000, (self._count, PROMPT), generator=numbers).tolist()
        return [Request("", prompt, self._new, ignore_eos=True, streamed=streamed) for prompt in prompts]

    def one(self, streamed: bool = False) -> list[Request]:
        """The requests with one probe for all."""
        asked = (ResolvedReadout(self._probe, Tokens()),)
        return [dataclasses.replace(one, readouts=asked) for one in self.made(streamed)]

    def many(self) -> list[Request]:
        """The requests with a probe of its own for each, at eight layers."""
        return [
            dataclasses.replace(one, readouts=(ResolvedReadout(probe, Tokens()),))
            for one, probe in zip(self.made(), self._probes, strict=True)
        ]

    def features(self) -> list[Request]:
        """The requests with an autoencoder's largest features for all."""
        asked = (ResolvedReadout(self._sae, Tokens(), TOP_K),)
        return [dataclasses.replace(one, readouts=asked) for one in self.made()]

    def steered(self, gated: bool) -> list[Request]:
        """The requests with a steering vector of zeros, so that tokens stay the same, with a gate or without."""
        when = Condition(readout="r0", above=0.5)

        def edit() -> Edit:
            gate = Gate(self._probe, 0, when, Tokens()) if gated else None
            return Edit(self._point, "add", vector=self._vector, gate=gate)

        return [dataclasses.replace(one, edits=(edit(),)) for one in self.made()]

    def product(self, rounds: int) -> dict[str, float]:
        """Milliseconds of an autoencoder's product alone, and with its largest features, on a decode's rows."""
        rows = torch.randn(self._count, self._sae.readout.hidden, device=self._model.device)
        weight, bias = (self._sae.readout._tensors[name] for name in ("W_enc", "b_enc"))
        ways: dict[str, Callable[[], object]] = {
            "product": lambda: torch.addmm(bias, rows, weight),
            "top features": lambda: [part.cpu() for part in largest(self._sae.readout.encode(rows), TOP_K)],
        }
        found: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(10 * rounds):
            for name, way in ways.items():
                began = time.perf_counter()
                way()
                found[name].append(1000 * (time.perf_counter() - began))
        return {name: round(statistics.median(times), 3) for name, times in found.items()}


@torch.inference_mode()
def main() -> None:
    """Measure, and print one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="a model's directory")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    name = "random-40m"
    if given.model:
        model = load(given.model)
    else:
        model = Model(measured_models.build(name), measured_models.tokenizer(name), name)
    engines, cases = (Engine(model), Engine(model)), Cases(model, given.requests, given.new_tokens)
    pairs: dict[str, tuple[Callable[[], list[Request]], Callable[[], list[Request]]]] = {
        "one probe": (cases.one, cases.made),
        "32 probes at 8 layers": (cases.many, cases.made),
        "autoencoder": (cases.features, cases.made),
        "gated over ungated steering": (lambda: cases.steered(True), lambda: cases.steered(False)),
        "streamed with a probe": (lambda: cases.one(streamed=True), lambda: cases.made(streamed=True)),
    }
    ratio(Side(engines[0], cases.made()), Side(engines[1], cases.made()))
    found: dict[str, object] = {"model": given.model or name, "requests": given.requests}
    for title, (ours, base) in pairs.items():
        ratios = [ratio(Side(engines[0], ours()), Side(engines[1], base())) for _ in range(given.rounds)]
        found[title] = [round(statistics.median(ratios), 3), round(min(ratios), 3), round(max(ratios), 3)]
    times = cases.product(given.rounds)
    found["autoencoder, ms a step"] = times
    found["beyond its product"] = round(times["top features"] / times["product"] - 1, 3)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
