"""`python -m evals.lenses fit MODEL --kind jacobian|tuned --data FILE --out DIR`: fit a lens of a model.

The Jacobian lens is that of Gurnee et al. (2026), "Verbalizable Representations Form a Global Workspace", with the
estimator of its published code (github.com/anthropics/jacobian-lens). The tuned lens is that of Belrose et al. (2023),
"Eliciting Latent Predictions from Transformers with the Tuned Lens", fitted with Adam.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import nn
from tqdm import tqdm

from deployments import __version__
from deployments.command_line import form, parser
from deployments.errors import LoadError, RequestError
from deployments.model.load import load
from deployments.model.model import Model
from deployments.model.packing import UnsupportedModelError
from deployments.model_files.names import source
from deployments.options import Options
from deployments.permissions import restrict
from deployments.places.watching import first_tensor, with_first
from deployments.readouts.files import as_file, define_lens
from deployments.readouts.sending import install
from deployments.readouts.spec import LensSpec
from deployments.readouts.values import FittedLens
from evals.config import EvalError

HELD_OUT = 10  # one sequence of so many is not fitted but measured
SAVE_EVERY = 8  # steps between saves of the state
# The options with which a stopped fit must have begun, besides the data.
SAME = ("model", "revision", "dtype", "kind", "length", "skip_first", "max_tokens", "batch", "epochs", "rate")


def main(argv: Sequence[str] | None = None) -> int:
    """Fit a lens; returns 0, or 2 where that is not possible, with the reason on stderr."""
    options = command().parse_args(argv)
    restrict(options.out)
    path = options.out / "lens.safetensors"
    try:
        held = fit(options, path)["held_out"]
        kept = options.install and install(options.install, path.read_bytes(), kind="lenses")
    except (EvalError, LoadError, RequestError, UnsupportedModelError, OSError, ValueError) as error:
        print(f"evals.lenses: {error}", file=sys.stderr)
        return 2
    if held:
        for layer, (plain, fitted) in enumerate(zip(held["plain"], held["fitted"], strict=True)):
            print(f"layer {layer}: KL {plain:.3f} plain, {fitted:.3f} through the lens")
    print(path)
    if kept:
        print(f'installed: send "logit_lens": {{"lens": "{kept["name"]}"}}')
    return 0


def fit(options: argparse.Namespace, path: Path) -> dict[str, Any]:
    """Fit a lens, or continue a stopped fit; writes the lens to `path` and returns its card.

    Raises:
        EvalError: The model has no logit lens, the data has no sequence to fit, or the directory is of another fit.
        LoadError, OSError, UnsupportedModelError, ValueError: From loading the model and reading the data.
    """
    served = options.model_id or Options(model=options.model).served_name
    spec = LensSpec(name=options.name or options.kind, model=served, kind=options.kind)
    model = load(source(options.model), revision=options.revision, dtype=options.dtype, device=options.device)
    if model.unembedding.refusal:
        raise EvalError(f"MODEL: {options.model} has no logit lens: {model.unembedding.refusal}")
    fitted, held_out = sequences(options, model.tokenizer)
    if not fitted:
        most = f"no text of {options.skip_first + 2} to {options.max_tokens} tokens"
        raise EvalError(f"--data: {options.data} has {most}: lower --skip-first, or raise --max-tokens")
    learner: Jacobian | Tuned
    if options.kind == "jacobian":
        steps = [[ids] for ids in fitted]
        learner = Jacobian(model, len(steps), options.skip_first, options.chunk)
    else:
        order = fitted * options.epochs
        steps = [order[first : first + options.batch] for first in range(0, len(order), options.batch)]
        learner = Tuned(model, len(steps), options.rate)
    settings = {name: getattr(options, name) for name in SAME} | {"revision": model.revision}
    settings["sha256"] = hashlib.sha256(options.data.read_bytes()).hexdigest()
    state, done = options.out / "state.pt", 0
    if state.exists():
        saved = torch.load(state, map_location="cpu", weights_only=True)
        if changed := [name for name, value in saved["settings"].items() if settings.get(name) != value]:
            raise EvalError(
                f"--out: {state} is of a fit with another {', '.join(changed)}: delete it, or choose another"
            )
        learner.load_state_dict(saved["learner"])
        done = saved["done"]
    options.out.mkdir(parents=True, exist_ok=True)
    for step in tqdm(range(done, len(steps)), desc=options.kind, unit="step", initial=done, total=len(steps)):
        learner.add(steps[step])
        if (done := step + 1) % SAVE_EVERY == 0:
            part = state.with_suffix(".part")
            torch.save({"learner": learner.state_dict(), "done": done, "settings": settings}, part)
            part.replace(state)
    dtype = getattr(torch, options.save_dtype)
    maps = {name: tensor.detach().to(dtype) for name, tensor in learner.maps().items()}
    defined = define_lens(save(maps), spec.model_dump())
    card = {
        **settings,
        "data": options.data.name,
        "sequences": len(fitted),
        "tokens": sum(map(len, fitted)),
        "held_out": losses(model, FittedLens(defined, model.device), held_out, options.skip_first),
        "versions": {"vitrine": __version__} | {name: version(name) for name in ("torch", "transformers")},
    }
    _, file = as_file(defined._replace(spec=spec.model_copy(update={"card": card})))
    path.write_bytes(file)
    state.unlink(missing_ok=True)
    return card


def sequences(options: argparse.Namespace, tokenizer: Any) -> tuple[list[list[int]], list[list[int]]]:
    """The token ids of the sequences to fit, and of every tenth, to measure; each up to its number of tokens.

    A text is cut into pieces of at most `length` tokens. Pieces without a counted position are left out.
    """
    texts = (tokenizer(text)["input_ids"] for text in _texts(options.data))
    pieces = (ids[first : first + options.length] for ids in texts for first in range(0, len(ids), options.length))
    parts: tuple[list[list[int]], list[list[int]]] = [], []
    left = [options.max_tokens, options.held_out_tokens]
    for number, piece in enumerate((piece for piece in pieces if len(piece) >= options.skip_first + 2), 1):
        which = int(number % HELD_OUT == 0)
        left[which] -= len(piece)
        if left[which] >= 0:
            parts[which].append(piece)
        elif max(left) < 0:
            break
    return parts


def _texts(path: Path) -> Iterator[str]:
    """The lines of a file, or the texts or questions in those of a `.jsonl` file; EvalError if one has none."""
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if path.suffix != ".jsonl" or not line.strip():
                yield line.rstrip("\n")
                continue
            try:
                given = json.loads(line)
            except ValueError as error:
                raise EvalError(f"--data: line {number} of {path} is not JSON: {error}") from error
            text = given.get("text", given.get("question")) if isinstance(given, dict) else None
            if not isinstance(text, str):
                raise EvalError(f"--data: line {number} of {path} has neither a text nor a question")
            yield text


def streams(model: Model, ids: torch.Tensor) -> list[torch.Tensor]:
    """The output of each layer, [batch, tokens, hidden], for token ids [batch, tokens].

    The graph of gradients begins at the first layer's output.
    """
    kept: list[torch.Tensor] = []

    def keep(_: Any, args: tuple[Any, ...], output: Any) -> Any:
        tensor = first_tensor(output)
        assert tensor is not None  # it is a point
        kept.append(tensor if kept else tensor.detach().requires_grad_(torch.is_grad_enabled()))
        return with_first(output, kept[-1])

    places = [point.place for point in model.points.named("layers.*.output", "MODEL")]
    hooks = [model.hf.get_submodule(place.module).register_forward_hook(keep) for place in places]
    try:
        model.hf.base_model(input_ids=ids.to(model.device), use_cache=False)  # without the head
    finally:
        for hook in hooks:
            hook.remove()
    return kept


class Jacobian(nn.Module):
    """The average Jacobian, which docs/lens.md defines, by vector-Jacobian products.

    Memory is that of `chunk` copies of a sequence with gradients, and of the maps on the CPU.
    """

    def __init__(self, model: Model, steps: int, skip_first: int, chunk: int) -> None:
        """Average over `steps` sequences; `chunk` entries of the last layer's output are differentiated at a time."""
        super().__init__()
        hidden = model.config.hidden_size
        self.mean: torch.Tensor
        self.register_buffer("mean", torch.zeros(model.points.layer_count - 1, hidden, hidden))
        self._model, self._steps, self._skip, self._chunk = model, steps, skip_first, chunk

    def add(self, batch: Sequence[Sequence[int]]) -> None:
        """Add the Jacobian of the only sequence of a batch."""
        (ids,) = batch
        counted = slice(self._skip, len(ids) - 1)
        *sources, final = streams(self._model, torch.tensor([ids]).expand(self._chunk, -1))
        for entries in torch.split(torch.arange(final.shape[-1]), self._chunk):
            wanted = torch.zeros_like(final)  # in copy i of the sequence, 1 at entries[i]
            wanted[torch.arange(len(entries)), counted, entries] = 1
            found = torch.autograd.grad(final, sources, wanted, retain_graph=True)
            for mean, gradient in zip(self.mean, found, strict=True):
                mean[entries] += gradient[: len(entries), counted].float().mean(1).cpu() / self._steps

    def maps(self) -> dict[str, torch.Tensor]:
        """`layers.N.weight`, [hidden, hidden] float32 on the CPU."""
        return {f"layers.{layer}.weight": mean for layer, mean in enumerate(self.mean)}


class Tuned(nn.Module):
    """h + A h + b of each layer, trained from zero to the least KL divergence from the final distribution."""

    def __init__(self, model: Model, steps: int, rate: float) -> None:
        """`rate` is Adam's learning rate in the first of `steps` steps; it falls linearly to 0."""
        super().__init__()
        hidden, layers = model.config.hidden_size, model.points.layer_count - 1
        self.layers = nn.ModuleList(nn.Linear(hidden, hidden, device=model.device) for _ in range(layers))
        for parameter in self.parameters():
            nn.init.zeros_(parameter)
        self._adam = torch.optim.Adam(self.parameters(), rate)
        self._schedule = torch.optim.lr_scheduler.LinearLR(self._adam, 1.0, 0.0, steps)
        self._model = model

    def add(self, batch: Sequence[Sequence[int]]) -> None:
        """Take a step by the gradient of a batch of sequences."""
        for ids in batch:
            with torch.no_grad():
                *sources, final = (stream[0] for stream in streams(self._model, torch.tensor([ids])))
                target = self._model.unembedding.logits(final).float().log_softmax(-1)
            for rows, linear in zip(sources, self.layers, strict=True):
                mapped = rows.float() + linear(rows.float())
                loss = divergence(self._model, target, mapped.to(rows.dtype)).mean() / len(batch)
                torch.autograd.backward(loss)
        self._adam.step()
        self._adam.zero_grad()
        self._schedule.step()

    def maps(self) -> dict[str, torch.Tensor]:
        """`layers.N.weight` [hidden, hidden] and `layers.N.bias` [hidden], float32 on the CPU."""
        maps = {name: tensor.cpu() for name, tensor in self.named_parameters()}
        return {name: each + torch.eye(len(each)) if each.ndim == 2 else each for name, each in maps.items()}

    def get_extra_state(self) -> Any:
        """The optimizer's part of the state that a fit continues from."""
        return self._adam.state_dict(), self._schedule.state_dict()

    def set_extra_state(self, state: Any) -> None:
        """Restore the optimizer's part."""
        adam, schedule = state
        self._adam.load_state_dict(adam)
        self._schedule.load_state_dict(schedule)


def divergence(model: Model, target: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """KL divergence [tokens], in nats, of target logprobs [tokens, vocabulary] to the distributions of rows."""
    logprobs = model.unembedding.logits(rows).float().log_softmax(-1)
    return nn.functional.kl_div(logprobs, target, reduction="none", log_target=True).sum(-1)


@torch.no_grad()
def losses(model: Model, lens: FittedLens, held_out: Sequence[Sequence[int]], skip_first: int) -> dict[str, Any] | None:
    """The mean KL divergence, in nats, of the plain logit lens and a fitted one, at positions from `skip_first`.

    Each list has one number for each layer; the last layer's is 0 but for rounding. None without sequences.
    """
    sums, positions = torch.zeros(2, model.points.layer_count, dtype=torch.float64), 0
    for ids in held_out:
        found = [stream[0, skip_first:] for stream in streams(model, torch.tensor([ids]))]
        target = model.unembedding.logits(found[-1]).float().log_softmax(-1)
        positions += len(target)
        for layer, rows in enumerate(found):
            for which, read in enumerate((rows, lens.apply(layer, rows))):
                sums[which, layer] += divergence(model, target, read).sum().double().cpu()
    if not positions:
        return None
    plain, fitted = (sums / positions).tolist()
    return {"sequences": len(held_out), "positions": positions, "plain": plain, "fitted": fitted}


def command() -> argparse.ArgumentParser:
    """The command's options."""
    text = "Fit a tuned or a Jacobian lens of a model, or continue a stopped fit."
    made = parser("evals.lenses", text, example := "fit smollm2 --kind tuned --data texts.jsonl --out lenses/tuned")
    commands = made.add_subparsers(dest="command", required=True, metavar="COMMAND")
    fit = commands.add_parser("fit", help="fit a lens", **form(text, f"{made.prog} {example}"))
    add = fit.add_argument
    add("model", metavar="MODEL", help="repository id, name or path, as for the server option model")
    add("--kind", required=True, choices=("jacobian", "tuned"), help="kind of the lens")
    add(
        "--data",
        required=True,
        type=Path,
        metavar="FILE",
        help="one text per line; in .jsonl the field text or question",
    )
    add("--out", required=True, type=Path, metavar="DIR", help="directory for lens.safetensors")
    add("--name", help="name in requests (default: the kind)")
    add("--model-id", metavar="NAME", help="id of the served model (default: the last component of MODEL)")
    add("--install", metavar="URL", help="address of a server to install the lens on")
    add("--save-dtype", default="float32", choices=("float32", "bfloat16"), help="dtype of the lens")
    add = fit.add_argument_group("model").add_argument
    add("--revision", help="branch, tag or commit of the repository")
    add("--dtype", default="auto", help="auto, float32, bfloat16 or float16")
    add("--device", help="cuda, cpu or a torch device (default: a GPU if there is one)")
    add = fit.add_argument_group("data").add_argument
    add("--max-tokens", type=int, default=100_000, metavar="N", help="maximum tokens to fit")
    add("--held-out-tokens", type=int, default=5_000, metavar="N", help="maximum tokens to measure")
    add("--length", type=int, default=128, metavar="N", help="tokens of a sequence; longer texts are split")
    add("--skip-first", type=int, default=16, metavar="N", help="first positions of a sequence to leave out")
    add = fit.add_argument_group("jacobian").add_argument
    add("--chunk", type=int, default=16, metavar="N", help="output dimensions per backward pass")
    add = fit.add_argument_group("tuned").add_argument
    add("--batch", type=int, default=8, metavar="N", help="sequences per step")
    add("--epochs", type=int, default=1, metavar="N", help="passes over the data")
    add("--rate", type=float, default=1e-3, metavar="X", help="learning rate")
    return made


if __name__ == "__main__":
    sys.exit(main())
