"""Compare what a served model records and generates with transformers: `python -m deployments.model.validate MODEL`.

An engine generates texts alone and together, one with an intervention, and records all canonical points of the first,
middle and last layer and of one layer of each kind. References are forward passes over the whole texts.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch
from pydantic import ValidationError

from deployments.command_line import parser
from deployments.engine import sequence
from deployments.engine.edits import Edit
from deployments.engine.engine import Engine
from deployments.engine.kv_memory import KvMemory, pages_for
from deployments.engine.request import Finished, Request
from deployments.errors import LoadError, RequestError
from deployments.model.batch import PAGE
from deployments.model.model import Model
from deployments.model.packing import TOLERANCE as LOGIT_TOLERANCE
from deployments.model.references import Changes, Values, by_hooks, by_nnsight, readable
from deployments.options import Options, mistakes
from deployments.points.capture import Capture
from deployments.points.names import dtype_name
from deployments.points.patterns import Patterns
from deployments.replica.engine_loading import load_engine
from vitrine.points import layer_of

AGAINST = ("transformers", "nnsight")
TOLERANCE = LOGIT_TOLERANCE | {torch.float32: 1e-4}  # of a row's difference, relative to its norm
SMALLEST = 1e-3  # of the mean norm: a row with a smaller norm is compared with this one
NOISE, TRIES = 1e-6, 6  # size (at least the dtype's precision) and number of random changes of the embedding
LONGEST, NEW, TOP = 80, 20, 10  # prompt tokens, new tokens of each text, likeliest tokens of each
CHUNK = 32  # prompt tokens of a forward pass: the longest prompt runs in pieces
CANONICAL = ("embed.", "layers.", "norm.", "lm_head.")
CHANGED = ("output", "mlp.output", "attention.output")  # the first that the middle layer has is changed
TEXT = (
    "The museum opened in 1887, and 3,214 people came on the first day. 'We did not expect that,' said the director. "
    "Nobody had printed enough tickets. def area(r): return 3.14159 * r ** 2  # m2\nEl río cruza la ciudad; "
    "die Brücke ist aus Stein. After 12 years, half of the glass (40 of 81 panes) had been replaced."
)


@dataclass(frozen=True)
class Result:
    """A comparison of rows."""

    point: str  # its name without the layer, or `logprobs` or `tokens`
    layer: int | None
    run: str  # `alone`, `together`, or `add`: changed while others ran together with it
    tokens: str  # `prompt` or `generated`
    against: str  # one of `AGAINST`
    # The largest distance of a row from the reference's, relative to that one's norm. For tokens, the distance of their
    # logits from the largest ones, relative to the norm of all.
    error: float
    rows: int  # their number
    # Rows beyond the tolerance that random changes of the embedding, as small as rounding, also change in transformers
    # alone, as where another expert is chosen. They are left out of `error`.
    unstable: int
    ok: bool  # whether the error is within the tolerance, and at most half of the rows are unstable


@dataclass
class Report:
    """The results of a model; `served` is "together" or "one at a time", `skipped` what was not compared, and why."""

    architecture: str
    dtype: str
    device: str
    served: str
    tolerance: float
    preempted: int = 0
    results: list[Result] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether all results are."""
        return all(result.ok for result in self.results)

    @property
    def worst(self) -> float:
        """The largest error."""
        return max(result.error for result in self.results)

    def text(self) -> str:
        """A table for each reference, with a line for each point: the largest errors of all layers."""
        about = f"{self.architecture} in {self.dtype} on {self.device}: sequences run {self.served}"
        lines = [f"{about}, {self.preempted} preemptions, tolerance {self.tolerance:.0e}"]
        for against in dict.fromkeys(result.against for result in self.results):
            here = [result for result in self.results if result.against == against]
            runs = list(dict.fromkeys(result.run for result in here))
            lines += ["", f"{f'against {against}':32}" + "".join(f"{run:18}" for run in runs)]
            lines += [" " * 32 + "prompt   new      " * len(runs)]
            for point in dict.fromkeys(result.point for result in here):
                found = [result for result in here if result.point == point]
                line, unstable = f"{point:32}", sum(result.unstable for result in found)
                for cell in [(run, tokens) for run in runs for tokens in ("prompt", "generated")]:
                    errors = [result.error for result in found if (result.run, result.tokens) == cell]
                    line += f"{max(errors):<9.1e}" if errors else " " * 9
                line += "ok" if all(result.ok for result in found) else "WRONG"
                rows = sum(result.rows for result in found)
                lines.append(line + (f", {unstable} of {rows} rows unstable" if unstable else ""))
        return "\n".join([*lines, *(f"not compared: {reason}" for reason in self.skipped)])


class _Text:
    """A prompt and what the engine generated, with the values of a plain forward pass over both."""

    def __init__(self, model: Model, request: Request, done: Finished) -> None:
        self.request, self.done = request, done
        self.run = request.id.split()[0]
        self.ids = [*request.prompt, *done.tokens]
        self._hf = model.hf
        (self._embedding,) = model.points.named("embed.output", "point")
        self._changes: Changes = {edit.point: partial(torch.add, edit.vector) for edit in request.edits}
        self.wanted = by_hooks(self._hf, self.ids, request.points, self._changes)
        self._moved: Values = {}

    def moved(self, name: str) -> torch.Tensor:
        """[tokens] the most that a random change of the embedding moves each row of a point or of `logits`."""
        for seed in range(TRIES if not self._moved else 0):
            changes = {self._embedding: partial(_noisy, self._hf.dtype, seed)} | dict(self._changes)
            for point, value in by_hooks(self._hf, self.ids, self.request.points, changes).items():
                far = row_errors(value, self.wanted[point])
                self._moved[point] = torch.maximum(self._moved.get(point, far), far)
        return self._moved[name]

    def errors(self, wanted: Values) -> Iterator[tuple[str, torch.Tensor]]:
        """The name and the [tokens] errors of each point that a reference has, and of logprobs and tokens."""
        captured, rest, prompt = self.done.captured, self.done.rest, len(self.request.prompt)
        for point in self.request.points:
            if point.name in wanted:
                errors = torch.full((len(self.ids),), torch.inf)
                rows = [*enumerate(self.ids)]
                if captured and [*zip(captured.positions, captured.token_ids, strict=True)] == rows:
                    value = captured.values[point.name]
                    errors = row_errors(value.padded() if isinstance(value, Patterns) else value, wanted[point.name])
                yield point.name, errors
        if rest:
            ids = torch.tensor(
                [[token, *(id for id, _ in one.top)] for token, one in zip(rest.tokens, rest.logprobs, strict=True)]
            )
            said = torch.tensor([[one.logprob, *(value for _, value in one.top)] for one in rest.logprobs])
            logits = wanted["logits"][prompt:]
            errors = row_errors(said, logits.log_softmax(-1).gather(1, ids))
            gaps = (logits.amax(1) - logits.gather(1, ids[:, :1])[:, 0]) / logits.norm(dim=1).clamp_min(1e-30)
            yield "logprobs", torch.cat([torch.zeros(prompt), errors])
            yield "tokens", torch.cat([torch.zeros(prompt), gaps])


def _noisy(dtype: torch.dtype, seed: int, rows: torch.Tensor) -> torch.Tensor:
    drawn = torch.randn(rows.shape, generator=torch.Generator().manual_seed(seed)).to(rows.device)
    return rows * (1 + max(NOISE, torch.finfo(dtype).eps) * drawn)


@torch.inference_mode()
def validate(model: Model, against: Sequence[str] = AGAINST[:1], longest: int = LONGEST) -> Report:
    """Compare what an engine records and generates with some of `AGAINST`, always the first.

    The longest prompt has `longest` tokens, or fewer if the context is too small. RequestError if the context or the
    memory is too small for the texts.
    """
    where = type(model.hf).__name__, dtype_name(model.dtype), str(model.device)
    report = Report(*where, "together" if model.packs else "one at a time", TOLERANCE[model.dtype])
    longest = min(longest, model.context - NEW)
    points = _points(model, report)
    texts = _run(model, Engine(model), [_request(model, "alone", longest // 3, points)])
    lengths = (7, longest, 3, longest // 4)
    asked = [_request(model, f"together {length}", length, points) for length in dict.fromkeys(lengths)]
    asked.append(_request(model, "together unrecorded", longest // 2, []))
    if edit := _edit(model, texts[0].wanted):
        asked.insert(0, replace(_request(model, "add", longest // 3, points), edits=(edit,)))
    else:
        report.skipped.append("add: the middle layer has no point for it")
    with patch.object(sequence, "RESERVED_TOKENS", 1):  # so that sequences outgrow the memory
        pages = sum(pages_for(len(request.prompt) + 1) for request in asked)
        sizes = KvMemory(model, 1, kv_bytes=1)
        memory = max(pages, pages_for(longest + NEW)) * PAGE * sizes.position_bytes + len(asked) * sizes.slot_bytes
        engine = Engine(model, max_running=len(asked), prefill_tokens=CHUNK, kv_bytes=memory)
        texts += sorted(_run(model, engine, asked), key=lambda text: text.run == "add")
    report.preempted = engine.statistics.preempted
    found: dict[tuple[str, str, str, str], list[torch.Tensor]] = defaultdict(list)
    for text in texts:
        if text.done.error:
            report.skipped.append(f"{text.run}: the engine failed: {text.done.error}")
        references = {AGAINST[0]: text.wanted}
        if "nnsight" in against and not text.request.edits:
            try:
                references["nnsight"] = by_nnsight(model, text.ids, text.request.points)
            except Exception as error:  # noqa: BLE001 - of nnsight or of what it makes of the model's code
                report.skipped.append(f"nnsight cannot run this model: {type(error).__name__}: {error}")
                against = AGAINST[:1]
        for reference, wanted in references.items():
            for name, errors in text.errors(wanted):
                if (far := errors > report.tolerance).any():
                    far &= text.moved(name if name in text.wanted else "logits") > report.tolerance / 2
                errors, prompt = errors.masked_fill(far, torch.nan), len(text.request.prompt)
                if name in text.wanted:
                    found[name, text.run, "prompt", reference].append(errors[:prompt])
                found[name, text.run, "generated", reference].append(errors[prompt:])
    for (name, run, tokens, reference), parts in found.items():
        errors = torch.cat(parts)
        unstable, worst = int(errors.isnan().sum()), max(errors[~errors.isnan()].tolist(), default=0.0)
        ok = worst <= report.tolerance and 2 * unstable <= len(errors)
        layer = layer_of(name)
        site = name.removeprefix(f"layers.{layer}.")
        report.results.append(Result(site, layer, run, tokens, reference, worst, len(errors), unstable, ok))
    return report


def _points(model: Model, report: Report) -> list[str]:
    """The names of the points to compare."""
    depth, kinds = model.points.layer_count, getattr(model.config, "layer_types", None) or []
    layers = {None, 0, depth // 2, depth - 1, *(kinds.index(kind) for kind in kinds)}
    canonical = [point for point in (*model.points, *model.points.more()) if point.name.startswith(CANONICAL)]
    here = [point for point in canonical if layer_of(point.name) in layers]
    report.skipped += [f"{point.name}: no reference" for point in here if not readable(model.hf, point)]
    return [point.name for point in here if readable(model.hf, point)]


def _request(model: Model, id: str, length: int, names: Sequence[str]) -> Request:
    """A request whose id begins with its run."""
    ids = [id for id in model.tokenizer(TEXT)["input_ids"] if id < model.vocabulary]
    prompt = [ids[(7 * length + i) % len(ids)] for i in range(max(1, length))]
    request = Request(id, prompt, NEW, ignore_eos=True, logprobs=TOP)
    if not names:
        return request
    capture = Capture(points=list(names))
    return replace(request, capture=capture, points=model.points.resolve(capture))


def _run(model: Model, engine: Engine, asked: Sequence[Request]) -> list[_Text]:
    return [_Text(model, *pair) for pair in zip(asked, engine.generate(asked), strict=True)]


def _edit(model: Model, values: Values) -> Edit | None:
    """An addition in the middle layer, as large as the values there."""
    names = [f"layers.{model.points.layer_count // 2}.{site}" for site in CHANGED]
    for name in [name for name in names if name in values][:1]:
        (point,) = model.points.named(name, "point")
        vector = torch.randn(point.shape, generator=torch.Generator().manual_seed(0))
        return Edit(point, "add", vector=(vector * values[name].float().square().mean().sqrt()).to(model.device))
    return None


def row_errors(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    """[rows] distance of each row from the wanted one, relative to that one's norm; infinite if it is not finite."""
    if got.shape != want.shape:
        return torch.full((len(want),), torch.inf)
    got, want = (value.double().flatten(1) for value in (got, want))
    norms = want.norm(dim=1)
    far: torch.Tensor = (got - want).norm(dim=1) / norms.clamp_min(SMALLEST * float(norms.mean())).clamp_min(1e-30)
    return far.nan_to_num(nan=torch.inf).float()


def command() -> argparse.ArgumentParser:
    """The command's options."""
    text = "Compare a model's recorded activations and tokens with those of transformers."
    made = parser("deployments.model.validate", text, "smollm2 --dtype float32")
    add = made.add_argument
    add("model", metavar="MODEL", help="repository id, name or path, as for the server option model")
    choices = (AGAINST[0], ",".join(AGAINST))
    add("--against", choices=choices, default=AGAINST[0], metavar="LIST", help=" or ".join(choices))
    add("--dtype", help="float32, bfloat16 or float16 (default: the checkpoint's)")
    add("--device", help="cuda, cpu or a torch device (default: a GPU if there is one)")
    add("--tokens", type=int, default=LONGEST, metavar="N", help="length of the longest prompt")
    add("--set", action="append", default=[], metavar="NAME=VALUE", help="server option; repeatable")
    add("--json", type=Path, metavar="FILE", help="file for the results of each layer")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Validate a model, print the results, and return the status that docs/models.md describes."""
    given = command().parse_args(arguments)
    settings = {name: value for name in ("dtype", "device") if (value := getattr(given, name))}
    settings |= {name: value for name, _, value in (setting.partition("=") for setting in given.set)}
    try:
        options = Options.model_validate({"model": given.model} | settings)
        report = validate(load_engine(options).model, given.against.split(","), given.tokens)
        if given.json:
            found = {"model": given.model, "ok": report.ok} | asdict(report)
            given.json.write_text(json.dumps(found, indent=1) + "\n")
    except (ValidationError, LoadError, RequestError, OSError) as error:
        reasons = [getattr(error, "message", str(error))]
        if isinstance(error, ValidationError):
            reasons = [f"{name}: {reason}" for name, reason in mistakes(error)]
        print(*(f"deployments.model.validate: {reason}" for reason in reasons), sep="\n", file=sys.stderr)
        return 2
    print(report.text())
    return 0 if report.ok else 1


if __name__ == "__main__":
    sys.exit(main())
