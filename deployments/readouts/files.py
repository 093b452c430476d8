"""Files of readouts and fitted lenses: the checks of an uploaded one, those on disk, and SAELens' format.

A file `<root>/.readouts/<name>.safetensors` or `<root>/.lenses/<name>.safetensors` has its spec in the metadata. Names
are per owner. SAELens saves `cfg.json` and `sae_weights.safetensors` in a directory.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, get_args

import torch
from pydantic import BaseModel, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, load_file, save

from deployments.accounts import OPERATOR, Account
from deployments.client_data.files import ClientFile, ClientFiles, pieces_of
from deployments.client_data.tensors import header_of, is_finite
from deployments.errors import RequestError
from deployments.points.names import canonical
from deployments.readouts.spec import LensSpec, Normalization, ReadoutSpec

_METADATA_KEY = "vitrine"  # of a file's metadata: the id, the entries of a row that it reads, and its values or layers
_DTYPES = {torch.float16: "F16", torch.bfloat16: "BF16", torch.float32: "F32", torch.float64: "F64"}
_OF_METADATA = ("name", "model", "point", "kind", "activation", "description")
Spec = TypeVar("Spec", bound=BaseModel)
_LENS_TENSOR = re.compile(r"layers\.(0|[1-9][0-9]{0,3})\.(weight|bias)")
# Tensors of each kind: their dimensions by name, and whether they are required.
_LINEAR = {
    "weight": (("k", "hidden"), True),
    "bias": (("k",), False),
    "mean": (("hidden",), False),
    "std": (("hidden",), False),
    "slope": (("k",), False),
    "offset": (("k",), False),
}
_SAE = {
    "W_enc": (("hidden", "k"), True),
    "W_dec": (("k", "hidden"), True),
    "b_enc": (("k",), True),
    "b_dec": (("hidden",), True),
}
_OF_ACTIVATION = {
    "jumprelu": {"threshold": (("k",), True)},
    "gated": {"b_gate": (("k",), True), "b_mag": (("k",), True), "r_mag": (("k",), True)},
}


class Definition(NamedTuple):
    """A checked readout."""

    spec: ReadoutSpec
    tensors: dict[str, torch.Tensor]  # by name, on the CPU, as sent
    hidden: int  # the number of entries of a row that it reads
    size: int  # the number of its values


class LensDefinition(NamedTuple):
    """A checked lens: for layer l the map of rows h to `weight @ h + bias`, `layers.l.weight` and `layers.l.bias`."""

    spec: LensSpec
    tensors: dict[str, torch.Tensor]  # [hidden, hidden] and [hidden], on the CPU, as sent
    hidden: int
    layers: list[int]  # ascending; the rows of others stay as they are


def define_lens(data: bytes | Path, spec: Mapping[str, Any] | None = None) -> LensDefinition:
    """The lens of a safetensors file; arguments and errors as of `define`."""
    read, tensors = _read(data, spec, LensSpec)
    layers, sizes = set[int](), dict[str, int]()
    for name, tensor in tensors.items():
        if not (match := _LENS_TENSOR.fullmatch(name)) or f"layers.{match[1]}.weight" not in tensors:
            raise _refused(f"{name!r}: a lens has layers.N.weight, and maybe layers.N.bias, for each layer N it maps")
        _check(name, tensor, ("hidden", "hidden") if match[2] == "weight" else ("hidden",), sizes)
        layers.add(int(match[1]))
    if not layers:
        raise _refused("it has no tensor; a lens has layers.N.weight for each layer N it maps")
    return LensDefinition(read, tensors, sizes["hidden"], sorted(layers))


def define(data: bytes | Path, spec: Mapping[str, Any] | None = None) -> Definition:
    """The readout of a safetensors file, mapped if it is a path; fields that the spec leaves out are of its metadata.

    RequestError, which names the field, if the file or the spec is invalid, or the tensors do not fit.
    """
    read, tensors = _read(data, spec, ReadoutSpec)
    sizes = _sizes(read, tensors)
    if read.labels is not None and len(read.labels) != sizes["k"]:
        message = f"spec.labels has {len(read.labels)} labels, but the readout has {sizes['k']} values"
        raise RequestError(message, "spec.labels")
    if read.k is not None and read.k > sizes["k"]:
        raise RequestError(f"spec.k is {read.k}, but the readout has {sizes['k']} features", "spec.k")
    return Definition(read, tensors, sizes["hidden"], sizes["k"])


def _read(
    data: bytes | Path, given: Mapping[str, Any] | None, kind: type[Spec]
) -> tuple[Spec, dict[str, torch.Tensor]]:
    """The spec that is given and in a file's metadata, and the file's tensors."""
    try:
        with data.open("rb") if isinstance(data, Path) else io.BytesIO(data) as file:
            header = header_of(file)
        tensors = load_file(data) if isinstance(data, Path) else load(data)
        metadata = json.loads(header).get("__metadata__") or {}
    except (SafetensorError, ValueError, RecursionError) as error:
        raise _refused(f"not a complete safetensors file: {error}") from error
    except KeyError as error:  # a dtype that torch lacks
        raise _refused(f"it has tensors of a dtype that is not supported: {error}") from error
    return _spec({**_metadata_spec(metadata), **(given or {})}, kind), tensors


def _metadata_spec(metadata: Mapping[str, str]) -> dict[str, Any]:
    """The spec in a file's metadata; empty for other files."""
    if "spec" in metadata:
        given = _json(metadata["spec"], RequestError("it is not JSON", "spec"))
        if not isinstance(given, dict):
            raise RequestError("send a JSON object", "spec")
        return given
    spec: dict[str, Any] = {name: metadata[name] for name in _OF_METADATA if name in metadata}
    if "labels" in metadata:
        spec["labels"] = _json(metadata["labels"], _refused("the labels in its metadata are not JSON"))
    return spec


def _json(text: str, refusal: RequestError) -> Any:
    """Parse a client's JSON; raises `refusal` if it is invalid or nested too deeply."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise refusal from error


def _spec(fields: dict[str, Any], kind: type[Spec]) -> Spec:
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"])
        message = first["msg"].removeprefix("Value error, ")
        raise RequestError(message, f"spec{place}") from error


def _sizes(spec: ReadoutSpec, tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """The sizes `hidden` and `k`."""
    wanted = _LINEAR if spec.kind == "linear" else _SAE | _OF_ACTIVATION.get(spec.activation, {})
    if spec.activation == "gated":
        wanted = {name: what for name, what in wanted.items() if name != "b_enc"}
    if missing := [name for name, (_, needed) in wanted.items() if needed and name not in tensors]:
        raise _refused(f"the tensor {missing[0]!r} is missing; this kind of readout has {', '.join(wanted)}")
    if unknown := sorted(tensors.keys() - wanted.keys()):
        raise _refused(f"unknown tensor {unknown[0]!r}; this kind of readout has {', '.join(wanted)}")
    for pair in (("mean", "std"), ("slope", "offset")):
        if (pair[0] in tensors) != (pair[1] in tensors):
            raise _refused(f"send both {pair[0]} and {pair[1]}, or neither")
    sizes = dict[str, int]()
    for name, (dimensions, _) in wanted.items():
        if name in tensors:
            _check(name, tensors[name], dimensions, sizes)
    if "std" in tensors and not (tensors["std"] > 0).all():
        raise _refused("'std' has a value that is not above 0")
    return sizes


def _check(name: str, tensor: torch.Tensor, dimensions: tuple[str, ...], sizes: dict[str, int]) -> None:
    """Reject a tensor of another dtype or shape than its dimensions, or not finite; adds the dimensions to `sizes`."""
    if tensor.dtype not in _DTYPES:
        raise _refused(f"{name!r} has the dtype {tensor.dtype}: use one of {', '.join(_DTYPES.values())}")
    if len(tensor.shape) != len(dimensions) or 0 in tensor.shape:
        raise _refused(f"{name!r} has the shape {list(tensor.shape)}, but must have [{', '.join(dimensions)}]")
    for dimension, size in zip(dimensions, tensor.shape, strict=True):
        if sizes.setdefault(dimension, size) != size:
            message = f"{name!r} has the shape {list(tensor.shape)}, but {dimension} is {sizes[dimension]}"
            raise _refused(message)
    if not is_finite(tensor):
        raise _refused(f"{name!r} has a value that is not finite")


def _refused(message: str) -> RequestError:
    return RequestError(message, "file", "invalid_file")


def _spec_json(spec: BaseModel) -> str:
    return spec.model_dump_json(exclude_none=True, exclude_defaults=True)


def as_file(defined: Definition | LensDefinition) -> tuple[str, bytes]:
    """An id by the tensors and the spec, and the safetensors file that the store keeps."""
    id, metadata = _described(defined)
    return id, save(defined.tensors, metadata)


def _described(defined: Definition | LensDefinition) -> tuple[str, dict[str, str]]:
    """An id by the tensors and the spec, and the metadata of the file that the store keeps."""
    digest = hashlib.sha256(_spec_json(defined.spec).encode())
    for name, tensor in sorted(defined.tensors.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    kind = "lens" if isinstance(defined, LensDefinition) else "readout"
    id = f"{kind}-{digest.hexdigest()[:32]}"
    sizes = json.dumps([id, defined.hidden, defined[3]])
    return id, {"spec": _spec_json(defined.spec), _METADATA_KEY: sizes}


def _with_metadata(path: Path, metadata: Mapping[str, str]) -> Iterator[bytes]:
    """A safetensors file with other metadata."""
    with path.open("rb") as file:
        header = json.dumps(json.loads(header_of(file)) | {"__metadata__": metadata}).encode()
        first = file.tell()
    header += b" " * (-len(header) % 8)
    yield len(header).to_bytes(8, "little") + header
    yield from pieces_of(path, first)


class ReadoutFiles(ClientFiles):
    """Every readout below one root."""

    folder, kind, noun, verb, full = ".readouts", "readouts", "readout", "install", "readout_store_full"
    most_files = 1 << 10

    def described(self, path: Path) -> tuple[str, dict[str, Any]]:
        """What the file's metadata say."""
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
        id, hidden, values = json.loads(metadata[_METADATA_KEY])
        # Whoever puts a file into the directory may choose another name for it.
        return id, self._about(metadata["spec"], hidden, values) | {"name": path.stem.partition("@")[0]}

    def put(
        self,
        path: Path,
        spec: Mapping[str, Any] | None,
        most: int,
        account: Account = OPERATOR,
    ) -> dict[str, Any]:
        """Store a copy of a file with its spec, as `keep` does. RequestError if it is not valid."""
        id, metadata = _described(defined := self._define(path, spec))
        about = self._about(_spec_json(defined.spec), defined.hidden, defined[3])
        new = ClientFile(defined.spec.name, account.owner, id, path.stat().st_size, 0.0, about)
        return self.keep(new, _with_metadata(path, metadata), most, account)

    def _define(self, data: Path, spec: Mapping[str, Any] | None) -> Definition | LensDefinition:
        return define(data, spec)

    def _about(self, spec: str, hidden: int, values: Any) -> dict[str, Any]:
        """The fields that answers have; `spec` is JSON."""
        activation = ReadoutSpec.model_validate_json(spec).activation
        return {"object": "readout", **json.loads(spec), "activation": activation, "hidden": hidden, "values": values}


class LensFiles(ReadoutFiles):
    """Every fitted lens below one root; an operator may put files that `evals.lenses` wrote there before it starts."""

    folder, kind, noun, full = ".lenses", "lenses", "lens", "lens_store_full"

    def _define(self, data: Path, spec: Mapping[str, Any] | None) -> LensDefinition:
        return define_lens(data, spec)

    def _about(self, spec: str, hidden: int, values: Any) -> dict[str, Any]:
        return {"object": "lens", **json.loads(spec), "hidden": hidden, "layers": values}


# A readout's activation by SAELens' architecture and, in its versions before 6, the activation function.
_SAELENS_ACTIVATIONS = {
    "standard": {"relu": "relu", "topk": "topk"},
    "gated": {"relu": "gated"},
    "topk": {"topk": "topk"},
    "jumprelu": {"relu": "jumprelu"},
}
_SAELENS_FOLDING = (
    *("fold_ln", "center_writing_weights", "center_unembed", "fold_value_biases", "refactor_factored_attn_matrices"),
)
# Settings of `cfg.json` in all versions. Others are refused, as they may change features: those of training runs, too.
_SAELENS_USED = (
    *("architecture", "activation_fn", "activation_fn_str", "activation_fn_kwargs", "k", "d_in", "d_sae"),
    *("apply_b_dec_to_input", "normalize_activations", "reshape_activations", "rescale_acts_by_decoder_norm"),
    *("finetuning_scaling_factor", "hook_name", "hook_name_out", "hook_head_index", "model_name", "metadata"),
    "model_from_pretrained_kwargs",
)
# No encoder reads these: where its training rows came from, and where and how precisely it computes (here in float32).
_SAELENS_IGNORED = (
    *("model_class_name", "hook_layer", "hook_head_index_out", "hf_hook_name", "hf_hook_name_out", "context_size"),
    *("prepend_bos", "exclude_special_tokens", "seqpos_slice", "dataset_path", "dataset_trust_remote_code"),
    *("neuronpedia_id", "sae_lens_version", "sae_lens_training_version", "device", "dtype"),
)


def read_saelens(directory: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """A directory's spec without a name, and its tensors; RequestError with the reason if it is not supported."""
    try:
        config = json.loads((directory / "cfg.json").read_text())
        tensors = load_file(directory / "sae_weights.safetensors")
    except (OSError, ValueError, RecursionError, KeyError, SafetensorError) as error:  # KeyError: torch lacks the dtype
        raise RequestError(f"{directory} is not a SAELens directory: {error}", "file") from error
    if not isinstance(config, dict):
        raise RequestError(f"{directory}/cfg.json is not a JSON object", "file")
    spec = _saelens_spec(config)
    if "W_enc" not in tensors:
        raise RequestError(f"{directory} has no W_enc, but {', '.join(sorted(tensors))}", "file")
    for name, size in zip(("d_in", "d_sae"), tensors["W_enc"].shape, strict=True):
        if config.get(name) not in (None, size):
            shape = list(tensors["W_enc"].shape)
            raise RequestError(f"{name} is {config[name]}, but W_enc has the shape {shape}", name)
    for name in ("scaling_factor", "finetuning_scaling_factor"):  # which some versions save without using it
        if name in tensors and bool((tensors[name] == 1).all()):
            del tensors[name]
    if spec["activation"] == "gated":
        tensors.pop("b_enc", None)
    return spec, tensors


def _saelens_spec(config: Mapping[str, Any]) -> dict[str, Any]:
    """Convert `cfg.json` to a readout's spec without a name.

    Raises:
        RequestError: The kind is not supported; names the setting.
    """
    about = {**config, **(config.get("metadata") or {})}
    architecture = config.get("architecture", "standard")
    if "transcoder" in str(architecture) or about.get("hook_name_out") not in (None, about.get("hook_name")):
        raise RequestError("a transcoder reads one point and writes another, so it cannot be a readout", "architecture")
    if architecture not in _SAELENS_ACTIVATIONS:
        raise RequestError(f"{architecture!r} is not one of {', '.join(_SAELENS_ACTIVATIONS)}", "architecture")
    if "hook_point" in about:
        message = "this configuration's version does not record whether the model's weights were changed for training"
        raise RequestError(f"{message}: load it with a current SAELens, and save it", "hook_point")
    if unknown := sorted(config.keys() - {*_SAELENS_USED, *_SAELENS_IGNORED}):
        message = "this setting is unknown; save a training run's autoencoder for inference (`save_inference_model`)"
        raise RequestError(message, unknown[0])
    if config.get("finetuning_scaling_factor"):
        raise RequestError("it is fine-tuned by a scaling factor, which is not supported", "finetuning_scaling_factor")
    if about.get("hook_head_index") is not None:
        raise RequestError("it reads a single head, which is no row of a point", "hook_head_index")
    if config.get("reshape_activations") not in (None, "none", "hook_z"):  # `hook_z`: all heads in one row, as here
        raise RequestError(f"{config['reshape_activations']!r} is not supported", "reshape_activations")
    if folded := [name for name in _SAELENS_FOLDING if (about.get("model_from_pretrained_kwargs") or {}).get(name)]:
        message = f"it was trained on a model whose weights were changed by {folded[0]}: the served model's rows differ"
        raise RequestError(message, f"model_from_pretrained_kwargs.{folded[0]}")
    spec: dict[str, Any] = {
        "kind": "sae",
        **_saelens_activation(config, architecture),
        "apply_b_dec_to_input": bool(config.get("apply_b_dec_to_input", True)),
        "normalize_activations": _saelens_normalization(config),
    }
    if about.get("model_name"):
        spec["model"] = about["model_name"]
    if about.get("hook_name"):
        spec["point"] = _point_of_hook(about["hook_name"])
    return spec


def _saelens_activation(config: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    """The spec's fields of the activation: SAELens' `topk` also has a `k`."""
    functions = _SAELENS_ACTIVATIONS[architecture]
    function = config.get("activation_fn") or config.get("activation_fn_str") or next(iter(functions))
    if function not in functions:
        raise RequestError(f"{function!r} is not supported with the architecture {architecture}", "activation_fn")
    fields: dict[str, Any] = {"activation": functions[function]}
    arguments = config.get("activation_fn_kwargs") or {}
    given = {f"activation_fn_kwargs.{name}": value for name, value in arguments.items()}
    given |= {name: config[name] for name in ("k", "rescale_acts_by_decoder_norm") if config.get(name)}
    if function == "topk":
        fields["k"] = given.pop("k", given.pop("activation_fn_kwargs.k", None))
        fields["rescale_acts_by_decoder_norm"] = bool(given.pop("rescale_acts_by_decoder_norm", False))
    if given:
        message = f"the activation {function} does not take this: remove it, or correct activation_fn"
        raise RequestError(message, next(iter(given)))
    return fields


def _saelens_normalization(config: Mapping[str, Any]) -> str:
    """The spec's `normalize_activations`; SAELens sets it to `none` when it folds a factor into the weights."""
    normalization = config.get("normalize_activations") or "none"
    if normalization in (True, "expected_average_only_in"):
        message = "the factor of the rows is not in the file: fold it (`fold_activation_norm_scaling_factor`) and save"
        raise RequestError(message, "normalize_activations")
    if normalization not in get_args(Normalization):
        raise RequestError(f"{normalization!r} is not supported", "normalize_activations")
    return str(normalization)


def _point_of_hook(hook: str) -> str:
    """The point of TransformerLens' name of a hook."""
    point = canonical(hook)
    if not re.fullmatch(r"layers\.\d+\.[\w.]+", point):
        raise RequestError(f"{hook!r} is not a point of a layer: docs/concepts.md lists them", "hook_name")
    return point
