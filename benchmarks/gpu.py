"""The engine on a GPU, without Ray, compared with transformers' `generate`: `python -m benchmarks.gpu`.

Random weights of Qwen3-0.6B's and Qwen3-8B's shapes in bfloat16. Checks greedy tokens, logprobs, captured rows and
steering against transformers, then measures tokens per second, and peak memory. `--size tiny` runs in float32 on a CPU.
Not yet run on a GPU: the lines for "cuda" here are untested. Ends with 1 where parity fails.

A machine needs torch, transformers, llguidance, pydantic and numpy; not nnsight, Ray or pyarrow.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import platform
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.common import measured_models
from benchmarks.common.measuring import synchronize, timed
from deployments.engine.edits import Edit
from deployments.engine.engine import Engine
from deployments.engine.request import Delta, Finished, Request
from deployments.model.model import Model
from deployments.points.capture import Capture

# Greatest difference of a logprob, and of rows relative to their norm. The engine and `generate` run batches of other
# shapes, for which a library picks other kernels that add up in another order. In float32 that is about 1e-6. bfloat16
# keeps 8 bits, so each layer rounds by up to 2^-9, which dozens of layers add up. These bounds are not calibrated on
# a GPU yet. Tokens may differ in either dtype only where the reference's two logits are within the logprob's bound.
LOGPROB = {torch.float32: 1e-4, torch.bfloat16: 0.125}
ROWS = {torch.float32: 1e-4, torch.bfloat16: 0.05}
PARITY_ROWS, TOP = 4, 5
_ids = itertools.count()


@dataclass
class Case:
    """An engine and transformers' own model, on copies of the same weights."""

    hf: Any
    engine: Engine
    device: str
    prompts: list[list[int]]
    new_tokens: int

    @classmethod
    def build(cls, size: str, device: str, rows: int, new_tokens: int) -> Case:
        """Random weights, made on the device, and random prompts of 16 tokens."""
        dtype = torch.float32 if size == "tiny" else torch.bfloat16
        with torch.device(device):
            hf = measured_models.build(size, dtype, device)
        model = Model(copy.deepcopy(hf), measured_models.tokenizer(size), size)
        ids = torch.randint(1024, model.vocabulary, (rows, 16), generator=torch.Generator().manual_seed(0))
        return cls(hf, Engine(model, max_running=rows), device, ids.tolist(), new_tokens)

    def requests(self, rows: int, points: list[str] | None = None, **options: Any) -> list[Request]:
        """The first prompts, under new ids."""
        options["owner"] = f"turn {next(_ids)}"  # a turn shares no prompt with an earlier one
        if points:
            capture = Capture(points=points)
            options |= {"capture": capture, "points": self.engine.model.points.resolve(capture)}
        return [
            Request(f"r{next(_ids)}", prompt, self.new_tokens, ignore_eos=True, **options)
            for prompt in self.prompts[:rows]
        ]

    @torch.inference_mode()
    def generate(self, rows: int, logits: bool = False) -> Any:
        """Transformers' greedy tokens [rows, tokens], or with logits its whole result."""
        ids = torch.tensor(self.prompts[:rows], device=self.device)
        settings = transformers.GenerationConfig(  # type: ignore[no-untyped-call]
            do_sample=False,
            max_new_tokens=self.new_tokens,
            pad_token_id=0,
            eos_token_id=None,
            output_logits=logits,
            return_dict_in_generate=logits,
        )
        return self.hf.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            generation_config=settings,
        )

    def scored(self, requests: list[Request]) -> list[Delta]:
        """What each request generated in one piece, with logprobs."""
        deltas = dict[str, list[Delta]]()
        left = len(requests)
        for request in requests:
            self.engine.submit(request)
        while left:
            for event in self.engine.step(wait=True):
                left -= isinstance(event, Finished)
                if isinstance(event, Delta):
                    deltas.setdefault(event.id, []).append(event)
        return [
            deltas[one.id][0]._replace(
                tokens=tuple(token for delta in deltas[one.id] for token in delta.tokens),
                logprobs=tuple(logprob for delta in deltas[one.id] for logprob in delta.logprobs),
            )
            for one in requests
        ]

    def steering(self) -> Edit:
        """A vector as long as half a layer's output, added in the middle."""
        points = self.engine.model.points
        (point,) = points.named(f"layers.{points.layer_count // 2}.output", "point")
        vector = torch.randn(point.shape, generator=torch.Generator().manual_seed(1))
        return Edit(point, "add", vector=vector.to(self.device))


def same_tokens(case: Case, done: list[Delta], reference: Any) -> dict[str, Any]:
    """Greedy tokens and logprobs, up to where a row's tokens first differ."""
    bound = LOGPROB[case.hf.dtype]
    logits = torch.stack(reference.logits, 1).float().cpu()  # [rows, tokens, vocabulary]
    start, same, worst, widest = len(case.prompts[0]), 0, 0.0, 0.0
    for row, finished in enumerate(done):
        theirs, differ = reference.sequences[row, start:].tolist(), False
        for at, (token, said) in enumerate(zip(finished.tokens, finished.logprobs, strict=True)):
            known = logits[row, at].log_softmax(-1)
            for id, logprob in said.top:
                worst = max(worst, abs(float(known[id]) - logprob))
            if token != theirs[at]:
                widest, differ = max(widest, float(known[theirs[at]] - known[token])), True
                break
        same += not differ
    return {
        "rows": len(done),
        "same_tokens": same,
        "worst_logprob": worst,
        "widest_tie": widest,
        "tolerance": bound,
        "ok": worst <= bound and widest <= bound,
    }


@torch.inference_mode()
def same_rows(case: Case) -> dict[str, Any]:
    """Recorded layer outputs beside `output_hidden_states` of the same tokens."""
    bound, worst = ROWS[case.hf.dtype], 0.0
    requests = case.requests(min(PARITY_ROWS, len(case.prompts)), ["layers.*.output"])
    for request, finished in zip(requests, case.engine.generate(requests), strict=True):
        captured = finished.captured
        assert captured is not None
        ids = torch.tensor([[*request.prompt, *finished.tokens]], device=case.device)
        states = case.hf(ids, output_hidden_states=True).hidden_states[1:]
        for layer, state in enumerate(states):
            mine: Any = captured.values[f"layers.{layer}.output"]
            mine = mine.to(case.device)
            if layer == len(states) - 1:  # transformers gives the last one behind the final norm
                mine = case.hf.get_decoder().norm(mine)
            theirs = state[0, list(captured.positions)].float()
            worst = max(worst, float(((mine.float() - theirs).norm(dim=-1) / theirs.norm(dim=-1)).max()))
    return {"worst_relative": worst, "tolerance": bound, "ok": worst <= bound}


def parity(case: Case) -> dict[str, Any]:
    """How far greedy tokens, recorded rows and steering differ from transformers', and whether that is too far."""
    rows = min(PARITY_ROWS, len(case.prompts))
    plain = case.generate(rows, logits=True)
    greedy = same_tokens(case, case.scored(case.requests(rows, logprobs=TOP)), plain)
    edit = case.steering()
    vector = edit.vector
    assert vector is not None

    def steer(_: Any, __: Any, output: Any) -> Any:
        hidden = output if isinstance(output, torch.Tensor) else output[0]
        moved = (hidden.float() + vector).to(hidden.dtype)
        return moved if isinstance(output, torch.Tensor) else (moved, *output[1:])

    layers = case.hf.get_decoder().layers
    hook = layers[len(layers) // 2].register_forward_hook(steer)
    try:
        theirs = case.generate(rows, logits=True)
    finally:
        hook.remove()
    steered = same_tokens(case, case.scored(case.requests(rows, logprobs=TOP, edits=(edit,))), theirs)
    steered["changed"] = float((theirs.logits[0] - plain.logits[0]).abs().max())
    steered["ok"] = steered["ok"] and steered["changed"] > steered["tolerance"]  # or the check would show nothing
    return {"greedy": greedy, "capture": same_rows(case), "steering": steered}


def bandwidth(device: str, size: int) -> float:
    """Bytes per second of a copy on the device, read and written; the best of 10."""
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target, best = torch.empty_like(source), float("inf")
    for _ in range(10):
        synchronize(device)
        began = time.perf_counter()
        target.copy_(source)
        synchronize(device)
        best = min(best, time.perf_counter() - began)
    return 2 * size / best


def peak(device: str) -> int:
    """Peak bytes: allocated on a GPU since the last reset, else resident in this process since its start."""
    if torch.device(device).type == "cuda":  # not run on a GPU yet
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def speeds(case: Case, rows: int, step_seconds: float) -> dict[str, Any]:
    """Tokens per second of each way, the better of two turns behind one for nothing."""
    edit, engine, start = case.steering(), case.engine, len(case.prompts[0])

    def ours(*args: Any, **options: Any) -> Callable[[], list[list[int]]]:
        return lambda: [list(done.tokens) for done in engine.generate(case.requests(rows, *args, **options))]

    ways: dict[str, Callable[[], list[list[int]]]] = {
        "generate": lambda: case.generate(rows)[:, start:].tolist(),
        "engine": ours(),
        "one layer": ours([edit.point.name]),
        "all layers": ours(["layers.*.output"]),
        "steered": ours(edits=(edit,)),
    }
    found: dict[str, Any] = {}
    for name, way in ways.items():
        if torch.device(case.device).type == "cuda":  # not run on a GPU yet
            torch.cuda.reset_peak_memory_stats(case.device)
        way()
        rate = max(timed(way, case.device).rate for _ in range(2))
        found[name] = {
            "tokens_per_second": rate,
            "of_roofline": rate * step_seconds / rows,
            "peak_bytes": peak(case.device),
        }
    for numbers in found.values():
        numbers["of_generate"] = numbers["tokens_per_second"] / found["generate"]["tokens_per_second"]
    return found


def measure(size: str, device: str, batches: list[int], new_tokens: int, copied: float) -> dict[str, Any]:
    """One model's parity, and its tokens per second and peak bytes for each number of rows."""
    case = Case.build(size, device, max(batches), new_tokens)
    # A step looks up a few rows of the input embedding, and reads all other weights once.
    skipped = case.hf.get_input_embeddings().weight
    weights = sum(weight.nbytes for weight in case.hf.parameters() if weight is not skipped)
    shape = measured_models.SHAPES[size]
    found: dict[str, Any] = {"shape": shape, "dtype": str(case.hf.dtype), "weight_bytes": weights}
    found["parity"] = parity(case)
    found["roofline_step_seconds"] = weights / copied
    found["rows"] = {str(rows): speeds(case, rows, weights / copied) for rows in batches}
    return found


def main(arguments: list[str] | None = None) -> int:
    """Check, measure, and write the findings; gives the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    shapes = ("tiny", "qwen3-0.6b", "qwen3-8b")
    parser.add_argument("--size", choices=shapes, action="append", help="again for more than one; both Qwen3 shapes")
    parser.add_argument("--device", help="cuda unless the size is tiny")
    parser.add_argument("--rows", type=int, action="append", help="again for more than one; 1, 32 and 128")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--json", type=Path, help="where the findings go")
    options = parser.parse_args(arguments)
    sizes: list[str] = options.size or list(shapes[1:])
    device = options.device or ("cpu" if sizes == ["tiny"] else "cuda")
    cuda = torch.device(device).type == "cuda"
    copied = bandwidth(device, 2**30 if cuda else 2**26)
    found: dict[str, Any] = {
        "device": torch.cuda.get_device_name(device) if cuda else platform.processor() or platform.machine(),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "copy_bytes_per_second": copied,
        "new_tokens": options.new_tokens,
        "sizes": {},
    }
    print(json.dumps({name: value for name, value in found.items() if name != "sizes"}, indent=1), flush=True)
    for size in sizes:
        found["sizes"][size] = measure(size, device, options.rows or [1, 32, 128], options.new_tokens, copied)
        print(json.dumps({size: found["sizes"][size]}, indent=1), flush=True)
        if options.json:  # after each, so that a later failure loses nothing
            options.json.write_text(json.dumps(found, indent=1))
    return int(not all(check["ok"] for one in found["sizes"].values() for check in one["parity"].values()))


if __name__ == "__main__":
    sys.exit(main())
