"""Patching: activations of one prompt replace those of another, one at a time, where the prompts align."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from vitrine.connection.transport import together
from vitrine.experiments.collecting import new_session
from vitrine.experiments.generating import MOST_VARIANTS, gathered
from vitrine.experiments.lenses import LensMethods
from vitrine.experiments.patch_cells import Columns, Pair, Row, aligned, chosen
from vitrine.experiments.plots import heat_map, shown
from vitrine.experiments.prompt_batches import Prompt, check_one
from vitrine.points import layer_of, listed, matching

NO_WAY = 1e-3  # the difference between the values of two prompts that is only rounding
SITES = {"resid": "resid_post", "attn_out": "attn_out", "mlp_out": "mlp_out", "heads": "z"}
NEXT_TOKEN = {"layers": [-1], "top_k": 1, "tokens": "prompt_last"}  # the lens that reads the model's own prediction
LOGITS = "lm_head.output"
RESAMPLES = 2000  # of the pairs, for an interval

Direction = Literal["denoise", "noise"]
Metric = Literal["logit_difference", "probability", "kl"]
Method = Literal["exact", "attribution"]
Values = npt.NDArray[Any]
# Of a pair: the metric of the prompt that gives activations and of the one that receives them, the changes of it by
# patches, `[rows, columns]`, and by patches of the receiving prompt into itself.
Measured = tuple[float, float, Values, Values | None]


@dataclass(frozen=True, repr=False)
class PatchGrid:
    """The effect on a prompt's prediction of replacing one activation at a time by that of another prompt.

    Attributes:
        values: `[rows, columns]`: the metric with the patch of that row's hook site at that column's tokens. By
            `method="attribution"`, a linear estimate of it. Of several pairs, all values are means.
        rows: The hook sites: `resid 3`, `heads 3.5` (layer and head), ...
        layers: The layer of each row.
        positions: The tokens of each column: the clean prompt's position and the corrupt prompt's.
        tokens: Their texts; of several pairs, those of the first.
        clean: The metric of the clean prompt.
        corrupt: The metric of the corrupt prompt.
        unpatched: The metric of the prompt that receives the patches.
        floor: The noise: the largest change by patches of a prompt into itself; None if it was not measured.
        interval: `[2, rows, columns]`: of several pairs, the limits of the 95 % interval of `changes`; else None.
        correlation: With `compare`, Pearson's correlation of the estimated changes with the exact ones; else None.

    Examples:
        >>> grid = server.patch_grid("Ann has 3 boxes of", "Ann has 4 boxes of", target=" pens", against=" boxes")
        >>> grid.values.shape == (6, len(grid.positions))
        True
    """

    values: Values
    rows: list[str]
    layers: list[int]
    positions: Columns
    tokens: list[tuple[str, str]]
    clean: float
    corrupt: float
    unpatched: float
    floor: float | None = None
    interval: Values | None = None
    correlation: float | None = None

    @property
    def changes(self) -> Values:
        """What the patches change: `values` minus the unpatched prompt's.

        Examples:
            >>> grid = server.patch_grid("Tom has 3", "Tom has 3", target=" ", layers=[0], floor=False)
            >>> bool(abs(grid.changes).max() < 1e-3)
            True
        """
        return self.values - self.unpatched

    @property
    def restored(self) -> Values:
        """`values` scaled from the unpatched prompt's, 0, to the other prompt's, 1; nan if both are equal.

        Examples:
            >>> grid = server.patch_grid("Tom has 3", "Tom has 4", target=" ", layers=[-1], positions=[-1])
            >>> round(float(grid.restored[0, 0]), 1)
            1.0
        """
        way = self.clean + self.corrupt - 2 * self.unpatched
        return self.changes / (way if abs(way) > NO_WAY else np.nan)

    def plot(self, path: str | Path | None = None) -> Any:
        """A heat map of the changes, with a grey dot where one is within the noise; ImportError without matplotlib.

        Examples:
            >>> figure = server.patch_grid("Tom has 3", "Tom has 4", target=" ").plot(path="grid.png")
        """
        names = [shown(own) if own == other else f"{shown(own)} / {shown(other)}" for own, other in self.tokens]
        return heat_map(
            self.changes,
            self.rows,
            names,
            title=f"change by a patch (clean {self.clean:.2f}, corrupt {self.corrupt:.2f})",
            labels=("token: clean / corrupt", "patched"),
            path=path,
            centred=True,
            faint=None if self.floor is None else np.abs(self.changes) <= self.floor,
        )

    def __repr__(self) -> str:
        shape = f"{len(self.rows)} rows x {len(self.positions)} tokens"
        noise = "" if self.floor is None else f", floor={self.floor:.2g}"
        agreement = "" if self.correlation is None else f", correlation={self.correlation:.3f}"
        return f"PatchGrid({shape}, clean={self.clean:.3f}, corrupt={self.corrupt:.3f}{noise}{agreement})"


class PatchGridMethods(LensMethods):
    """The part of `Server` that patches activations."""

    def _in_nnsight(self) -> AbstractContextManager[Any]:
        raise NotImplementedError  # in `AsyncServer`, which knows the connections

    async def patch_grid(
        self,
        clean: Prompt | None = None,
        corrupt: Prompt | None = None,
        *,
        target: str | int | None = None,
        against: str | int | None = None,
        pairs: Sequence[tuple[Any, ...]] | None = None,
        sites: str | Sequence[str] = "resid",
        direction: Direction = "denoise",
        metric: Metric = "logit_difference",
        method: Method = "exact",
        layers: Sequence[int] | None = None,
        positions: Sequence[int] | None = None,
        align: Columns | None = None,
        floor: bool = True,
        compare: bool = False,
        progress: bool | None = None,
    ) -> PatchGrid:
        """Patch activations of one prompt into another, at one hook site and token at a time.

        Each cell is one forward pass, and one more to measure the noise; one request has 64 of them, which run
        together. The prompts' activations are stored in a new session, `patch-...`.

        Prompts of equal length align token by token, others by the longest common subsequence of their tokens.
        Stretches between common tokens align one to one if they have the same length, else only by their last tokens.

        Args:
            clean: A text or chat.
            corrupt: Another one.
            target: The token after the prompts, by its text (with its space, `" Paris"`) or id; `kl` needs none.
            against: The wrong token, whose logit is subtracted.
            pairs: Many tuples (clean, corrupt, target, against) instead of one. The i-th aligned tokens of all pairs
                share column i, so all pairs need the same number of them, and equal ones in the same columns.
            sites: Hook sites of each layer: `resid` (its output), `attn_out`, `mlp_out`, `heads` (each separately), or
                other points with `*` or without a layer, such as `resid_mid`, or `z` for all heads at once.
            direction: `denoise` patches clean activations into the corrupt prompt, `noise` the other way.
            metric: `logit_difference` (without `against` the target's logprob), the target's `probability`, or `kl`,
                the divergence of the next token's distribution from that of the clean prompt.
            method: `attribution` estimates all cells by the gradient of the metric, from two forward passes and a
                backward pass. It runs as remote nnsight code, which the operator must allow.
            layers: The layers, -1 for the last; by default all.
            positions: The clean prompt's positions, -1 for the last; by default all that are aligned.
            align: Positions (clean, corrupt) to patch instead of the tokens aligned as above.
            floor: Whether to measure the noise: the same grid with each prompt patched into itself.
            compare: With `method="attribution"`, also compute the exact grid, for `correlation`.
            progress: Whether to show a progress bar; by default in terminals and notebooks, for several requests.

        Raises:
            ValueError: The prompts align in several ways, or the pairs differently; an argument is missing or unknown;
                there is no such site; or the model has no `kl`.
            IndexError: There is no such layer or position.
            ServerError: The server rejects the request, for example because a target is several tokens.
            PermissionError: The key may not run remote nnsight code.

        Examples:
            >>> grid = server.patch_grid("Tom has 3", "Tom has 4", target=" ", sites="mlp_out", positions=[0, 3])
            >>> grid.values.shape, grid.tokens
            ((6, 2), [('Tom', 'Tom'), ('3', '4')])
        """
        options = {"direction": (direction, Direction), "metric": (metric, Metric), "method": (method, Method)}
        for name, (value, known) in options.items():
            if value not in get_args(known):
                raise ValueError(f"{name}: {value!r} is none of {', '.join(get_args(known))}")
        if (method, metric, direction) == ("attribution", "kl", "noise"):
            raise ValueError("metric: the gradient of kl is 0 at the clean prompt: choose direction='denoise'")
        asked = {"": (clean, corrupt, target, against)}
        if pairs is not None:
            asked = {f"pairs[{place}]: ": (*pair, None, None)[:4] for place, pair in enumerate(pairs)}
        if not asked:
            raise ValueError("pairs: give at least one")
        matched = await together(self._pair(name, *pair, metric, align) for name, pair in asked.items())
        equal = [[pair.ids[0][own] == pair.ids[1][other] for own, other in pair.columns] for pair in matched]
        if different := [name for name, shape in zip(asked, equal, strict=True) if shape != equal[0]]:
            raise ValueError(f"{different[0]}its tokens align otherwise than those of pairs[0]: reword it")
        rows = await self._rows([sites] if isinstance(sites, str) else sites, layers)
        if positions is not None:
            existing = [own for own, _ in matched[0].columns]
            picked = [*map(existing.index, chosen("positions", positions, existing, len(matched[0].ids[0])))]
            matched = [pair._replace(columns=[pair.columns[place] for place in picked]) for pair in matched]
        side, grids = (0 if direction == "denoise" else 1), list[PatchGrid]()
        if method == "attribution":
            estimated = await asyncio.to_thread(self._estimated, matched, rows, side, metric)
            grids.append(_grid(estimated, rows, matched[0], side))
        if method == "exact" or compare:
            of_patches, of_pairs = (progress, False) if pairs is None else (False, progress)
            calls = [(1, self._exact(pair, rows, side, metric, floor, of_patches)) for pair in matched]
            grids.append(_grid(await gathered(calls, "pair", of_pairs), rows, matched[0], side))
        first, last = grids[0], grids[-1]
        if first is last:
            return first
        correlation = np.corrcoef(first.changes.ravel(), last.changes.ravel())[0, 1]
        return replace(first, floor=last.floor, correlation=float(correlation))

    async def _pair(
        self, name: str, clean: Any, corrupt: Any, target: Any, against: Any, metric: Metric, align: Columns | None
    ) -> Pair:
        """Tokenize and align two prompts; errors begin with `name`."""
        check_one(clean, f"{name}clean")
        check_one(corrupt, f"{name}corrupt")
        targets = []
        if metric != "kl":
            if target is None:
                raise ValueError(f"{name}target: give the token whose {metric} is measured")
            lens = NEXT_TOKEN | {"targets": [target] if against is None else [target, against]}
            answer = await self.complete(clean, max_tokens=0, logit_lens=lens)
            targets = [found["token_id"] for found in _reading(answer["choices"][0])["targets"]]
        answers = await together(map(self._tokenized, (clean, corrupt)))
        ids, tokens = ([answer[field] for answer in answers] for field in ("tokens", "token_texts"))
        if not align:
            return Pair((clean, corrupt), ids, tokens, targets, aligned(ids, tokens))
        sides = zip(ids, zip(*align, strict=True), strict=True)
        columns = zip(*(chosen("align", own, range(len(all_)), len(all_)) for all_, own in sides), strict=True)
        return Pair((clean, corrupt), ids, tokens, targets, [*columns])

    async def _rows(self, sites: Sequence[str], layers: Sequence[int] | None) -> list[Row]:
        """The places to patch, site by site.

        Raises:
            ValueError: A site is not one place in each layer.
            IndexError: There is no such layer.
        """
        structure = await self.get("/model/structure", {"model": self.model})
        points = {point[kind]: point for point in structure["points"] for kind in ("module", "name")}
        rows = []
        for site in sites:
            names = matching(SITES.get(site, site), points, structure["layers"])
            by_layer = {layer: name for name in names if (layer := layer_of(name)) is not None}
            if not names or len(by_layer) < len(names):
                raise ValueError(f"sites: {site!r} is not one place in each layer, but {listed(names) or 'no point'}")
            for layer in chosen("layers", layers, sorted(by_layer), structure["layers"]):
                point = points[by_layer[layer]]
                place = layer, by_layer[layer], point["module"], structure["points"].index(point)
                if site != "heads":
                    rows.append(Row(f"{site} {layer}", *place))
                    continue
                rows += [Row(f"heads {layer}.{head}", *place, head) for head in range(point["shape"][0])]
        return rows

    async def _exact(
        self, pair: Pair, rows: Sequence[Row], side: int, metric: Metric, floor: bool, progress: bool | None
    ) -> Measured:
        """Run a pair's patches, from the prompt of this side into the other."""
        session = new_session("patch")
        points = [*dict.fromkeys(row.point for row in rows)]
        capture = {"points": points, "tokens": "prompt", "required": True, "return": "id"}
        kept = await together(
            self.complete(prompt, capture=capture, max_tokens=0, session_id=session) for prompt in pair.prompts
        )
        run_ids = [answer["activations_meta"]["runs"][0]["run_id"] for answer in kept]
        cells = [(row, column[side], column[1 - side]) for row in rows for column in pair.columns]
        patches = [[], *(row.patch(run_ids[side], at, into) for row, at, into in cells)]
        patches += [row.patch(run_ids[1 - side], into, into) for row, _, into in cells] if floor else []
        fields: dict[str, Any] = {"max_tokens": 0, "logit_lens": NEXT_TOKEN | {"targets": pair.targets}}
        if metric == "kl":
            fields |= {"session_id": session, "capture": capture | {"points": [LOGITS], "tokens": "prompt_last"}}
        asked: list[tuple[int, list[Any], bool | None]] = [(side, [[]], False), (1 - side, patches, progress)]
        choices = await together(
            self._variants([pair.prompts[own]], variants, "patch", shows, **fields) for own, variants, shows in asked
        )
        source, unpatched, *patched = await self._values([*choices[0], *choices[1]], metric, choices[side][0])
        changes = np.array(patched).reshape(-1, len(rows), len(pair.columns)) - unpatched
        return source, unpatched, changes[0], changes[1] if floor else None

    async def _values(self, choices: Sequence[Any], metric: Metric, clean: Any) -> Values:
        """The metric of each choice; `clean` is the choice of the unpatched clean prompt."""
        if metric == "kl":
            own, kl = await self._logprobs([clean]), list[float]()
            for first in range(0, len(choices), MOST_VARIANTS):  # so many distributions fit into memory
                kl += [*(np.exp(own) * (own - await self._logprobs(choices[first : first + MOST_VARIANTS]))).sum(-1)]
            return np.array(kl)
        found = np.array([[target["logprob"] for target in _reading(choice)["targets"]] for choice in choices])
        values: Values = np.exp(found[:, 0]) if metric == "probability" else found[:, 0] - found[:, 1:].sum(1)
        return values

    async def _logprobs(self, choices: Sequence[Any]) -> Values:
        """The next token's logprobs `[choices, vocabulary]`.

        Raises:
            ValueError: The model's logits are not the output of its head.
        """
        runs = await self.load_runs([(choice.get("message") or choice)["run_id"] for choice in choices])
        logits = np.stack([np.asarray(run[LOGITS][-1], np.float64) for run in runs])
        rounding = 0.05 + np.abs(logits).max() / 64  # twice that of bfloat16
        logits -= logits.max(-1, keepdims=True)
        logprobs: Values = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        tops = [_reading(choice)["top"][0] for choice in choices]
        if any(abs(row[top["token_id"]] - top["logprob"]) > rounding for row, top in zip(logprobs, tops, strict=True)):
            raise ValueError("metric: kl is not available for this model, which scales or caps the logits of its head")
        return logprobs

    def _estimated(self, pairs: Sequence[Pair], rows: Sequence[Row], side: int, metric: Metric) -> list[Measured]:
        """Estimate the pairs' grids by attribution, as remote nnsight code."""
        if inner := [row.name for row in rows if not row.module.endswith((".input", ".output"))]:
            raise ValueError(
                f"sites: method='attribution' takes inputs and outputs of modules, not {inner[0].split()[0]}"
            )
        with self._in_nnsight() as model:
            return [_attribution(model, pair, rows, side, metric) for pair in pairs]


def _reading(choice: dict[str, Any]) -> dict[str, Any]:
    """What the lens `NEXT_TOKEN` reads."""
    reading: dict[str, Any] = choice["logit_lens"]["prompt"][0]["layers"][0]
    return reading


def _attribution(model: Any, pair: Pair, rows: Sequence[Row], side: int, metric: Metric) -> Measured:
    """Estimate a pair's changes: the activations' difference along the metric's gradient in the receiving run."""
    import nnsight
    import torch

    paths = list(dict.fromkeys(row.module for row in sorted(rows, key=lambda row: row.order)))
    heads = [1 + max((row.head or 0) for row in rows if row.module == path) for path in paths]
    source, base = pair.ids[side], pair.ids[1 - side]
    at, into = ([column[of] for column in pair.columns] for of in (side, 1 - side))
    targets = pair.targets

    with model.session(remote=True):
        with model.trace(torch.tensor([source])):
            found = [model.get(path) for path in paths]
            kept = [(value[0] if isinstance(value, tuple) else value)[0, at].detach() for value in found]
            reference = model.output.logits[0, -1].detach().float().log_softmax(-1)
        with model.trace(torch.tensor([base])):
            found = [model.get(path) for path in paths]
            places = [value[0] if isinstance(value, tuple) else value for value in found]
            logprobs = model.output.logits[0, -1].float().log_softmax(-1)
            values = []
            for one in (reference, logprobs):
                if metric == "kl":
                    values.append((reference.exp() * (reference - one)).sum())
                elif metric == "probability":
                    values.append(one[targets[0]].exp())
                else:
                    values.append(one[targets[0]] - one[targets[1:]].sum())
            estimates = []
            with values[1].backward():
                for place in reversed(range(len(paths))):
                    change = (kept[place] - places[place][0, into]) * places[place].grad[0, into]
                    estimates.append(change.float().unflatten(-1, (heads[place], -1)).sum(-1))
            metrics = nnsight.save([value.detach() for value in values])
            estimates = nnsight.save(estimates)
    by_path = dict(zip(paths, estimates[::-1], strict=True))
    of_rows = [by_path[row.module].numpy() for row in rows]
    changes = [own.sum(1) if row.head is None else own[:, row.head] for row, own in zip(rows, of_rows, strict=True)]
    whole, unpatched = map(float, metrics)
    return whole, unpatched, np.stack(changes), None


def _grid(measured: Sequence[Measured], rows: Sequence[Row], pair: Pair, side: int) -> PatchGrid:
    """The means over pairs, with their interval; `pair` is the first."""
    sources, receivers, each, noise = zip(*measured, strict=True)
    unpatched, source, changes = float(np.mean(receivers)), float(np.mean(sources)), np.stack(each)
    interval = None
    if (count := len(measured)) > 1:
        drawn = np.random.default_rng(0).multinomial(count, [1 / count] * count, RESAMPLES) / count
        limits = [np.quantile(drawn @ changes[:, row], [0.025, 0.975], axis=0) for row in range(len(rows))]
        interval = np.stack(limits, axis=1)
    return PatchGrid(
        values=unpatched + changes.mean(0),
        rows=[row.name for row in rows],
        layers=[row.layer for row in rows],
        positions=pair.columns,
        tokens=[(pair.tokens[0][at], pair.tokens[1][other]) for at, other in pair.columns],
        clean=unpatched if side else source,
        corrupt=source if side else unpatched,
        unpatched=unpatched,
        floor=float(np.abs(np.mean(noise, axis=0)).max()) if noise[0] is not None else None,
        interval=interval,
    )
