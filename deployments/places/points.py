"""Capture points: the names of a model's places, and the shapes of their values.

A point is `<module>.<input|output>`, with canonical names (`layers.8.attention.output`) or the model's own module paths
(`model.layers.8.self_attn.q_proj.output`). A name is looked up among the modules that one forward visited when the
model was loaded. Text from a client is never evaluated.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import groupby
from typing import Any, get_args

import torch
from torch import nn

from deployments.errors import RequestError
from deployments.places.architectures import (
    ABSENT,
    OUTPUT_PROJECTIONS,
    Side,
    Values,
    canonical_modules,
    check_norms,
    find_layers,
    head_shape,
    inner_places,
    missing_branches,
    same_values,
)
from deployments.places.hook_site import HookSite, Point
from deployments.places.watching import (
    HEAD_SIDES,
    by_tokens,
    carried_on,
    drop_wrong_patterns,
    follows_tokens,
    place_of,
    watch,
    with_heads,
)
from deployments.points.capture import LAYERNORM_SITES, Capture
from deployments.points.names import COLUMNS, canonical, dtype_name, hooks_like
from deployments.savepoint import Savepoint
from vitrine.points import TRANSFORMER_LENS

MAX_POINTS = 4096


class Points:
    """All capture points of one model, and their names."""

    def __init__(self, model: Any, places: Iterable[HookSite], ids: torch.Tensor, seen: Values) -> None:
        """Name a model's places, and check the names by the values `seen` in a forward pass of `ids`."""
        modules = dict(model.named_modules())
        paths = {id(module): path for path, module in modules.items()}
        self.layers = find_layers(model, modules, seen)
        self.layer_count = len(modules[self.layers])
        # `layer_kinds` are as in the config's `layer_types`, if it has them.
        self._aliases, self.layer_kinds = canonical_modules(model, modules, paths, self.layers)
        check_norms(self._aliases, seen)
        attentions = {path for alias, path in self._aliases.items() if alias.endswith(".attention")}
        self._places = {
            f"{place.module}.{place.side}": place
            for place in places
            if not place.grows or place.module in attentions  # some layers pass their attention's patterns on
        }
        self._attention = model.config.get_text_config()._attn_implementation
        self._heads = dict(self._find_heads(model, modules))
        self._lacking = dict(missing_branches(self._aliases, seen))  # name -> the reason
        self._sites = dict(self._find_streams(model, ids, seen))  # canonical names without a side of a module
        for name, (path, side) in inner_places(modules, self._aliases, seen):
            if place := self._places.get(f"{path}.{side}"):
                self._sites.setdefault(name, place)
        self._savepoints: dict[str, Point] = {}

    @classmethod
    @torch.inference_mode()
    def learn(cls, model: Any) -> Points:
        """Run small forward passes and observe each module's input and output.

        Recomputed attention patterns are compared with those of eager attention.
        """
        vocabulary = model.get_input_embeddings().num_embeddings
        ids = torch.arange(1, 11, device=model.device).view(2, 5) % vocabulary
        longer = torch.arange(11, 32, device=model.device).view(3, 7) % vocabulary
        longer[1:, :5] = ids.flip(0)  # the same texts, as other rows of another batch
        seen, again = (with_heads(watch(model, texts), model, texts) for texts in (ids, longer))
        drop_wrong_patterns(seen, model, ids)
        places = []
        for order, ((path, side), value) in enumerate(seen.items()):
            place, other = place_of(path, side, order, value, ids), again.get((path, side))
            if place and other is not None and place_of(path, side, order, other, longer) == place:
                here, again_by_token = by_tokens(place, value, ids), by_tokens(place, other, longer)
                if follows_tokens(here, again_by_token[1:, :5].flip(0)[..., : here.shape[-1]]):
                    places.append(place)
        return cls(model, places, ids, seen)

    def __iter__(self) -> Iterator[Point]:
        """One point for each place, under its canonical name if it has one, in the order of execution."""
        names: dict[HookSite, str] = {}
        for name in self._canonical_names():
            point = self._lookup(name)
            if point:
                names.setdefault(point.place, name)
        for path, place in sorted(self._places.items(), key=lambda item: item[1].order):
            yield Point(names.get(place, path), place, place.shape)

    def more(self) -> Iterator[Point]:
        """Points beside those of `iter`, of whose places they are views: `attention.heads`, `resid_mid` and mixers."""
        listed = {point.name for point in self}
        for layer in range(self.layer_count):
            for site in ("attention.heads", "resid_mid", "mixer.input", "mixer.output"):
                if (point := self._lookup(f"layers.{layer}.{site}")) and point.name not in listed:
                    yield point

    def forget_heads(self, reason: str) -> None:
        """Have no points of queries and keys, for this reason."""
        for known in (self._places, self._sites):
            for name in [name for name, place in known.items() if place.side in HEAD_SIDES]:
                del known[name]
                self._lacking[name] = reason

    def _find_heads(self, model: Any, modules: Mapping[str, nn.Module]) -> Iterator[tuple[str, Point]]:
        """`layers.{i}.attention.heads`, the inputs of the layers' output projections."""
        for i in range(self.layer_count):
            attention, name = self._aliases.get(f"layers.{i}.attention"), f"layers.{i}.attention.heads"
            for projection in OUTPUT_PROJECTIONS if attention else ():
                place = self._places.get(f"{attention}.{projection}.input")
                width = place.shape if place and len(place.shape) == 1 else ()
                if place and width and (shape := head_shape(model, modules[f"{attention}"], *width)):
                    yield name, Point(name, place, shape)

    def _find_streams(self, model: Any, ids: torch.Tensor, seen: Values) -> Iterator[tuple[str, HookSite]]:
        """`layers.{i}.resid_mid`: the input of the MLP or the norm before it, to which the layer must add later."""
        readers: dict[str, str] = {}
        for i in range(self.layer_count):
            layer, name = self._aliases[f"layers.{i}"], f"layers.{i}.resid_mid"
            mixer, mlp = (self._aliases.get(f"layers.{i}.{part}", "") for part in ("mixer", "mlp"))
            reader = self._aliases.get(f"layers.{i}.post_attention_layernorm", mlp)
            first, middle = seen.get((layer, "input")), seen.get((reader, "input"))
            pairs = [(first, middle), (seen.get((mixer, "input")), seen.get((mlp, "input")))]
            self._lacking[name] = "nothing in this model's layers reads the residual stream after attention is added"
            if any(a is not None and b is not None and same_values(a, b) for a, b in pairs):
                self._lacking[name] = "attention and MLP of this model read the same residual stream"
            elif f"{reader}.input" in self._places and (layer, "output") in seen:
                readers[layer] = reader
                self._lacking[name] = f"this model does not add to what {reader} reads"
        carried = carried_on(model, ids, readers, seen)
        for i in range(self.layer_count):
            if (layer := self._aliases[f"layers.{i}"]) in carried:
                del self._lacking[f"layers.{i}.resid_mid"]
                yield f"layers.{i}.resid_mid", replace(self._places[f"{readers[layer]}.input"], stream=layer)

    def name(self, savepoints: Iterable[Savepoint]) -> None:
        """Add savepoints: points with names of their own, which are the default ones from now on.

        RequestError if a selector is not one point of this model, or a name cannot be one.
        """
        for i, savepoint in enumerate(savepoints):
            if savepoint.name in self._savepoints or savepoint.name in COLUMNS:
                raise RequestError(f"{savepoint.name!r} is taken: choose another name", f"savepoints[{i}].name")
            field = f"savepoints[{i}].selector"
            name, *more = self._expand(savepoint.selector, field)
            if more:
                raise RequestError("a savepoint is one point, but this selector matches several", field)
            point = self._lookup(name) or self._lookup(f"{name}.output") or self._refuse(name, field)
            self._savepoints[savepoint.name] = replace(point, name=savepoint.name)

    def resolve(self, capture: Capture) -> tuple[Point, ...]:
        """The points of a request, in the order of execution.

        RequestError, which names the field, if there is no such name or layer.
        """
        points: dict[str, Point] = {}
        for field, pattern in self._patterns(capture):
            for name in self._expand(pattern, field):
                points[name] = self._lookup(name) or self._refuse(name, field)
            if len(points) > MAX_POINTS:
                raise RequestError(f"more than {MAX_POINTS} points in one request", field)
        features, heads = capture.features, capture.heads
        for name, point in points.items():
            if heads and not (point.place.grows or len(point.shape) > 1):
                raise RequestError(f"{name} has no heads{self._heads_hint('; these have')}", "capture.heads")
            if heads and max(heads) >= point.shape[0]:
                raise RequestError(f"{name} has heads 0 to {point.shape[0] - 1}", "capture.heads")
            if features and point.place.grows:
                message = f"{name} is an attention pattern, which has no features: leave features out"
                raise RequestError(message, "capture.features")
            most = max(features.index) + 1 if features and features.index else features and features.first
            if most and most > point.shape[-1]:
                message = f"{name} has {point.shape[-1]} features, fewer than the requested {most}"
                raise RequestError(message, "capture.features")
        return tuple(sorted(points.values(), key=lambda point: point.place.order))

    def named(self, pattern: str, field: str) -> list[Point]:
        """The points that one name means for a change; RequestError if there is none, or no later module reads it."""
        names = self._expand(pattern, field)
        if re.search(r"att\w*\.weights$", pattern):  # even if they cannot be captured
            self._refuse_change(pattern, field)
        points = [self._lookup(name) or self._refuse(name, field) for name in names]
        for point in points:
            if point.place.grows:
                self._refuse_change(point.name, field)
        return points

    def _patterns(self, capture: Capture) -> Iterator[tuple[str, str]]:
        """(field, pattern) of everything that the request names, or of the defaults."""
        for i, pattern in enumerate(capture.points or ()):
            yield f"capture.points[{i}]", pattern
        if capture.layers is None and capture.sites is None:
            if capture.points is None:
                yield from (("capture", name) for name in self.default_names())
            return
        layers: Iterable[int | str] = self._default_layers() if capture.layers is None else capture.layers
        if capture.layers == "all":
            layers = range(self.layer_count)
        sites = capture.sites or [site for site in LAYERNORM_SITES if self._lookup(f"layers.0.{site}")]
        for j, layer in enumerate(layers):
            self._layer(int(layer), f"capture.layers[{j}]")
            for i, site in enumerate(sites or ["input"]):
                field = f"capture.sites[{i}]" if capture.sites else "capture.layers"
                yield field, f"layers.{layer}.{site}"

    def default_names(self) -> list[str]:
        """The savepoints, or both layernorm sites of layers at about a third, a half and two thirds of the depth."""
        if self._savepoints:
            return list(self._savepoints)
        sites = [site for site in LAYERNORM_SITES if self._lookup(f"layers.0.{site}")] or ["input"]
        return [f"layers.{layer}.{site}" for layer in self._default_layers() for site in sites]

    def _default_layers(self) -> list[int]:
        depth = self.layer_count
        if depth >= 24:
            depth -= depth % 6  # the same layers for similar depths: 8, 12 and 16 of 24 to 28
        return sorted({depth // 3, depth // 2, 2 * depth // 3})

    def _expand(self, pattern: str, field: str) -> list[str]:
        """Expand `*` to the layers that have the point, if any has, and negative and bracketed indices."""
        if pattern in self._savepoints:
            return [pattern]
        spelled = canonical(pattern)
        match = re.fullmatch(rf"({re.escape(self.layers)}|layers)\.(\*|-?\d+)((?:\..*)?)", spelled)
        if not match:
            return [spelled]
        prefix, index, rest = match.groups()
        layers = range(self.layer_count) if index == "*" else [self._layer(int(index), field)]
        rests = [".mlp.experts.ids", ".mlp.experts.weights"] if rest == ".mlp.experts" else [rest]
        names = [f"{prefix}.{layer}{rest}" for layer in layers for rest in rests]
        return [name for name in names if self._lookup(name)] or names

    def _layer(self, layer: int, field: str) -> int:
        if not -self.layer_count <= layer < self.layer_count:
            raise RequestError(f"there is no layer {layer}: this model has layers 0 to {self.layer_count - 1}", field)
        return layer % self.layer_count

    def _lookup(self, name: str) -> Point | None:
        if name in self._lacking:
            return None
        if point := self._savepoints.get(name) or self._heads.get(name):
            return point
        if place := self._places.get(name) or self._sites.get(name):
            return Point(name, place, place.shape)
        module, _, side = name.rpartition(".")
        if place := self._places.get(f"{self._aliases.get(module)}.{side}"):
            return Point(name, place, place.shape)
        return None

    def _refuse(self, name: str, field: str) -> Point:
        """Raise an error with the nearest existing names, or with the reason if the name is a canonical one."""
        layer = re.match(r"^layers\.(\d+)\b", name)
        if layer and name == f"layers.{layer[1]}.attention.weights":
            self._refuse_patterns(name, field)
        if reason := self._reason(name):
            raise RequestError(f"{name!r} is not a capture point of this model: {reason}", field, code="unknown_point")
        known = [*self._savepoints, *self._canonical_names(int(layer[1]) if layer else 0), *self._places]
        known += [] if "." in name else [hook for hook in TRANSFORMER_LENS if self._is_known(hook)]
        sides = [f"{name}.{side}" for side in ("output", "input")]  # of a module that is named without a side
        nearest = [other for other in sides + hooks_like(name) if self._is_known(other)]
        nearest = nearest or difflib.get_close_matches(name, known, 3, 0.4)
        hint = f"; the nearest names are {', '.join(nearest)}" if nearest else ""
        raise RequestError(f"{name!r} is not a capture point of this model{hint}", field, code="unknown_point")

    def _is_known(self, name: str) -> bool:
        try:
            return all(map(self._lookup, self._expand(name, "")))
        except RequestError:  # no such layer
            return False

    def _reason(self, name: str) -> str | None:
        """Why the model lacks a canonical name; None for other names."""
        if reason := self._lacking.get(name):
            module = self._aliases.get(name.removesuffix(".output"))
            return f"{reason}; its own output is the point {module}.output" if module else reason
        match = re.fullmatch(r"(layers\.\d+(?:\.(\w+))?)\.(input|output|heads|[qk]|router|experts\.\w+)", name)
        if not match or (match[2] and match[2] not in ABSENT):
            return None
        if match[1] not in self._aliases:
            return ABSENT[match[2]]
        if match[3] not in ("input", "output"):
            return ABSENT.get(f"{match[2]}.{match[3].partition('.')[0]}")
        return f"the {match[3]} of {self._aliases[match[1]]} has no row for each token"

    def _refuse_patterns(self, name: str, field: str) -> None:
        module = self._aliases.get(name.removesuffix(".weights"))
        message = f"{name}: this model's attention{f' ({module})' if module else ''} gives no patterns"
        if self._attention != "eager":
            message = f"{name}: attention patterns of this architecture cannot be recomputed while its attention is "
            message += f"{self._attention}: load the model with attention=eager"
        raise RequestError(message, field, "no_attention_patterns")

    def _refuse_change(self, name: str, field: str) -> None:
        message = f"{name} cannot be changed, because nothing later in the model reads it"
        raise RequestError(message + self._heads_hint(": change", ["heads"]), field)

    def _heads_hint(self, verb: str, sites: Iterable[str] = ("heads", "weights")) -> str:
        """The model's points of heads for a message; empty without any."""
        having = {
            site for i in range(self.layer_count) for site in sites if self._lookup(f"layers.{i}.attention.{site}")
        }
        names = [f"layers.{{i}}.attention.{site}" for site in sites if site in having]
        return f"{verb} {' and '.join(names)}" if names else ""

    def _canonical_names(self, layer: int | None = None) -> list[str]:
        names = [*self._sites, *(f"{alias}.{side}" for alias in self._aliases for side in get_args(Side))]
        if layer is not None:
            names = [n for n in names if not n.startswith("layers.") or n.startswith(f"layers.{layer}.")]
            names.append(f"layers.{layer}.attention.heads")
        return [name for name in names if self._lookup(name)]


def structure(hf: Any, points: Points, context: int) -> dict[str, Any]:
    """A Hugging Face model's architecture, sizes, capture points and modules, as JSON; `context` is in tokens."""
    listed = sorted([*points, *points.more()], key=lambda point: point.place.order)
    return {
        "architecture": type(hf).__name__,
        "layers": points.layer_count,
        "layer_kinds": points.layer_kinds,
        "hidden_size": hf.config.get_text_config().hidden_size,
        "max_model_len": context,
        "dtype": dtype_name(hf.dtype),
        "points": [
            {
                "name": point.name,
                "module": point.module,
                "shape": [*point.shape, "tokens"] if point.place.grows else list(point.shape),
                "dtype": dtype_name(point.place.dtype),
            }
            for point in listed
        ],
        "modules": _module("", hf),
    }


def _module(path: str, module: nn.Module) -> dict[str, Any]:
    """A module with its submodules; consecutive ones of the same structure are listed once, as `layers.0-27`."""
    children: list[dict[str, Any]] = []
    for (_, numbered), group in groupby(module.named_children(), lambda item: (_build(item[1]), item[0].isdecimal())):
        members = list(group)
        (first, child), (last, _) = members[0], members[-1]
        if numbered and first != last:
            members = [(f"{first}-{last}", child)]
        children += [_module(f"{path}.{name}" if path else name, child) for name, child in members]
    return {"path": path, "class": type(module).__name__} | ({"children": children} if children else {})


def _build(module: nn.Module) -> Any:
    own = [(name, tuple(weight.shape)) for name, weight in module.named_parameters(recurse=False)]
    return type(module), own, [(name, _build(child)) for name, child in module.named_children()]
