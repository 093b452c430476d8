"""Loads a model from the hub or a directory, maybe with a LoRA adapter, and identifies the weights it was loaded from.

Of a checkpoint that also takes images or audio, the language model is loaded, dequantized where kernels lack.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
import warnings
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import GatedRepoError
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMultimodalLM, AutoTokenizer
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.core_model_loading import PrefixChange
from transformers.integrations.hub_kernels import lazy_load_kernel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MULTIMODAL_LM_MAPPING
from transformers.quantizers.auto import AutoHfQuantizer
from transformers.utils.hub import cached_file, extract_commit_hash
from transformers.utils.peft_utils import find_adapter_config_file

from deployments.errors import LoadError
from deployments.model.model import Model
from deployments.model.packing import UnsupportedModelError
from deployments.model.weights import SharedWeights

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PEFT_NEEDED = "an adapter needs the package peft: pip install -c constraints.txt peft"
DEQUANTIZED = ("fp8", "mxfp8", "mxfp4")  # methods that transformers can dequantize while it loads
BFLOAT16 = ("avx512_bf16", "amx_bf16", "arm_bf16")  # torch's names of a processor's instructions for it
# Files of a directory that determine a model's answers; not those of training, such as `training_args.bin`.
FILES = (
    *("*.safetensors", "pytorch_model*.bin", "*.index.json", "config.json", CONFIG, "generation_config.json", "*.py"),
    *("tokenizer*", "vocab*", "merges*", "*.model", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template*", "additional_chat_templates/*.jinja"),
)
PIECE_BYTES = 64 << 10
PIECES = 256  # of one file; files up to their total size are read completely
# The settings with which merged weights are exact. Others may be unset only, such as those of peft's further variants.
EXACT = {"alpha_pattern", "ensure_weight_tying", "exclude_modules", "fan_in_fan_out", "layers_pattern", "lora_alpha"}
EXACT |= {"layers_to_transform", "modules_to_save", "r", "rank_pattern", "target_modules", "target_parameters"}
EXACT |= {"trainable_token_indices", "use_dora", "use_rslora"}
# Without effect on what is merged: facts, settings of training, and those of variants that are switched on by others.
EXACT |= {"auto_mapping", "base_model_name_or_path", "inference_mode", "lora_dropout", "megatron_core", "peft_type"}
EXACT |= {"peft_version", "qalora_group_size", "revision", "task_type"}

logger = logging.getLogger(__name__)


def load(
    name: str,
    *,
    revision: str | None = None,
    dtype: str = "auto",
    device: str | None = None,
    device_map: str | dict[str, Any] | None = None,
    trust_remote_code: bool = False,
    context: int | None = None,
    attention: str = "auto",
    share: bool = False,
    batch_invariant: bool = False,
    adapter: str | None = None,
) -> Model:
    """Load a model from the hub or a directory; of one that also takes images or audio, the language model.

    Args:
        name: A repository id or a directory.
        revision: The repository's branch, tag or commit.
        dtype: `auto` for the checkpoint's own, else `float32`, `bfloat16` or `float16`.
        device: The device; by default a GPU if there is one, else the CPU.
        device_map: Instead of `device`: how to spread the model, as in transformers.
        trust_remote_code: Run the repository's own code.
        context: A context shorter than the model's own, in tokens.
        attention: `eager` or `sdpa`, which is faster; `auto` for transformers' default.
        batch_invariant: Give each sequence the same bits whatever shares its forward passes.
        share: Store the weights in memory that other processes can map: `Model.shared`.
        adapter: A repository or directory with a LoRA adapter, which is merged into the weights.

    Raises:
        LoadError: The adapter cannot be merged.
        OSError: The repository or directory does not exist, or there is no memory to share.
        UnsupportedModelError: The model cannot be batched exactly, or its weights are missing, or quantized by a method
            that does not run here.
        ValueError: `share` is set, and other processes cannot use the model.
    """
    source = str(Path(name).expanduser()) if Path(name).expanduser().is_dir() else name
    where = {"revision": revision, "trust_remote_code": trust_remote_code}
    # Where peft is installed, transformers would load the model that an adapter names, and a pickle of the adapter's.
    if find_adapter_config_file(source, revision=revision) is not None:
        raise UnsupportedModelError(f"{name} has an adapter: name its base model, and {name} as the adapter")
    files = adapter_files(adapter) if adapter else None
    tokenizer = AutoTokenizer.from_pretrained(source, **where)
    tokenizer.chat_template = tokenizer.chat_template or _processors_template(source, revision)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device_map is None and device != "cpu":
        device_map = {"": device}  # a GPU gets the weights from the files, not through the host's memory
    chosen = {} if attention == "auto" else {"attn_implementation": attention}
    hf, quantization = _read_checkpoint(source, device_map=device_map, where=where, dtype=dtype, **chosen)
    if files:
        hf = merged(hf, files)
    has_bfloat16 = any(map(torch.cpu.get_capabilities().get, BFLOAT16))
    if hf.device.type == "cpu" and hf.dtype == torch.bfloat16 and not has_bfloat16:
        logger.warning(
            "this processor has no instructions for bfloat16, the dtype of %s: with dtype=float32 it takes twice the "
            "memory and is several times as fast",
            name,
        )
    shared = SharedWeights.of(hf.eval()) if share else None  # before the module gets hooks
    model = Model(hf, tokenizer, name, context, shared, revision_of(source, revision), batch_invariant)
    model.quantization = quantization
    if adapter:
        model.adapter_revision = revision_of(adapter, file=CONFIG)
    return model


def _processors_template(source: str, revision: str | None) -> str | None:
    """The chat template in the file of a model's processor, which tokenizers do not read; None if there is none."""
    lenient = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
    file = cached_file(source, "chat_template.json", revision=revision, **lenient)
    return json.loads(Path(file).read_text())["chat_template"] if file else None


def revision_of(source: str, asked: str | None = None, file: str = "config.json") -> str | None:
    """The revision of a model or adapter that has just been loaded: a commit, or a digest of its files.

    Args:
        source: A directory or a repository of the hub.
        asked: The requested branch, tag or commit of the repository, if any.
        file: A file of the repository that has been loaded.

    Returns:
        The commit of a repository, 40 hex digits. For a directory, `sha256:` and a digest of the names, sizes and bytes
        of the files that match `FILES`; for a file of more than 16 MiB, of 256 evenly spread pieces. None if the files
        can no longer be read.
    """
    try:
        if Path(source).is_dir():
            return f"sha256:{_digest(Path(source))}"
        config = cached_file(source, file, revision=asked, local_files_only=True)
        return extract_commit_hash(config, None)
    except OSError:
        logger.warning("the commit of %s cannot be determined", source, exc_info=True)
        return None


def _digest(directory: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted({path for kind in FILES for path in directory.glob(kind)}):
        if path.is_file():
            size = path.stat().st_size
            digest.update(f"{path.relative_to(directory)}:{size}\n".encode())
            with path.open("rb") as file:
                if size <= PIECES * PIECE_BYTES:
                    digest.update(file.read())
                else:
                    for piece in range(PIECES):
                        file.seek((size - PIECE_BYTES) * piece // (PIECES - 1))
                        digest.update(file.read(PIECE_BYTES))
    return digest.hexdigest()


# ---- checkpoints


def _read_checkpoint(
    source: str, *, device_map: Any, where: dict[str, Any], **options: Any
) -> tuple[Any, dict[str, Any] | None]:
    """The language model of a checkpoint, and `Model.quantization`.

    Where transformers has no class for the language model alone with the same weights, it is the whole model without
    the modules that no text reaches. UnsupportedModelError if weights are missing, or (before their download) if they
    are quantized by a method that does not run here.
    """
    config: Any = AutoConfig.from_pretrained(source, **where)
    text = config.get_text_config()
    if getattr(config, "tie_word_embeddings", False):  # which some state only there, and a text's class reads here
        text.tie_word_embeddings = True
    stated = getattr(config, "quantization_config", None) or getattr(text, "quantization_config", None)
    quantization = None
    if stated:
        settings, quantization = _quantization(stated, device_map)
        if quantization["dequantized"]:
            options["quantization_config"] = settings
    steps = get_checkpoint_conversion_mapping(text.model_type) or []  # type: ignore[no-untyped-call]
    if any(isinstance(step, PrefixChange) for step in steps):  # the text's class finds its weights in the whole model
        config = text
        config.quantization_config = stated
    loads: Any = AutoModelForCausalLM
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and type(config) in MODEL_FOR_MULTIMODAL_LM_MAPPING:
        loads = AutoModelForMultimodalLM
    hf, info = loads.from_pretrained(
        source, config=config, device_map=device_map, output_loading_info=True, **where, **options
    )
    if hf.config.get_text_config() is not hf.config:
        _drop_towers(hf, {hf.get_decoder(), hf.get_input_embeddings(), hf.get_output_embeddings()})
    if quantization and quantization["dequantized"]:
        _cast(hf, hf.config.get_text_config().dtype)
    if lacking := sorted(info["missing_keys"] & dict(hf.named_parameters()).keys()):
        message = f"it has no weights for {len(lacking)} tensors of {type(hf).__name__}, such as {lacking[0]}"
        raise UnsupportedModelError(f"{source} cannot be loaded: {message}")
    return hf, quantization


def _quantization(stated: dict[str, Any], device_map: Any) -> tuple[Any, dict[str, Any]]:
    """The settings with which to load quantized weights, and what to report of them."""
    method = stated.get("quant_method", "bitsandbytes")
    on_cpu = device_map is None or "cpu" in str(device_map)
    try:
        quantizer: Any = AutoHfQuantizer.from_config(dict(stated))
        settings = quantizer.quantization_config
        # For mxfp4, transformers checks for the kernel itself.
        if method in DEQUANTIZED and (on_cpu or (method != "mxfp4" and lazy_load_kernel("finegrained-fp8") is None)):
            settings.dequantize = True
        quantizer.validate_environment(device_map=device_map, weights_only=True)
    except Exception as error:  # each method checks its packages and devices with errors of its own
        need = f" (pip install {error.name})" if isinstance(error, ModuleNotFoundError) else ""
        message = f"its weights are quantized by {method}, which does not run here: {error}{need}"
        raise UnsupportedModelError(message) from error
    return settings, {"method": method, "dequantized": bool(getattr(settings, "dequantize", False))}


def _cast(hf: Any, dtype: torch.dtype) -> None:
    """Give all weights one dtype; beside dequantized ones, transformers leaves others in the checkpoint's dtypes."""
    kept = hf._keep_in_fp32_modules_strict or ()
    for name, weight in hf.named_parameters():
        if weight.is_floating_point() and not any(part in name for part in kept):
            weight.data = weight.data.to(dtype)


def _drop_towers(parent: torch.nn.Module, text: set[torch.nn.Module]) -> None:
    """Remove the modules that have none of the language model's and are in none of them: no text reaches them."""
    for name, child in [*parent.named_children()] if parent not in text else []:
        if text.isdisjoint(child.modules()):
            setattr(parent, name, None)
        else:
            _drop_towers(child, text)


# ---- adapters


def adapter_files(source: str) -> Path:
    """The directory of an adapter that can be merged; a repository is downloaded.

    LoadError if peft is missing, there is no such adapter, or its weights are not in safetensors or cannot be merged
    exactly.
    """
    if importlib.util.find_spec("peft") is None:
        raise _refusal(PEFT_NEEDED)
    try:
        config = cached_file(source, CONFIG)
        commit = extract_commit_hash(config, None)
        weights = cached_file(source, WEIGHTS, revision=commit, _raise_exceptions_for_missing_entries=False)
    except OSError as error:
        gated = isinstance(error.__cause__, GatedRepoError)
        code, status = ("model_gated", 403) if gated else ("model_not_found", 404)
        raise LoadError(f"the adapter {source} cannot be read: {error}", "adapter", code, status) from error
    if config is None or weights is None:
        raise _refusal(f"{source} has no {WEIGHTS}, and weights in another format, such as a pickle, are not read")
    settings = json.loads(Path(config).read_text())
    given = {name for name, value in settings.items() if value and value != "none"}
    if settings.get("init_lora_weights") in (True, "gaussian"):  # others may change the model's own weights
        given.remove("init_lora_weights")
    if settings.get("peft_type") != "LORA":
        given = {f"peft_type {settings.get('peft_type')}"}
    if inexact := sorted(given - EXACT):
        raise _refusal(f"{source} cannot be merged exactly, because its {CONFIG} sets {', '.join(inexact)}")
    return Path(config).parent


def merged(hf: Any, directory: Path) -> Any:
    """Merge an adapter into the weights of a model without hooks, which keep their dtype: the sums are rounded once.

    LoadError if the adapter is for another model, or the model's weights are quantized or not in memory.
    """
    from peft import LoraConfig, PeftModel
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import set_peft_model_state_dict

    quantization = getattr(hf.config, "quantization_config", None)
    quantized = quantization is not None and not getattr(quantization, "dequantize", False)
    if quantized or any(weight.is_meta for weight in hf.parameters()):
        raise _refusal("an adapter cannot be merged exactly into weights that are quantized or left on the disk")
    own = set(map(id, hf.parameters()))
    with warnings.catch_warnings(action="ignore"):  # what matters of them raises an error below
        try:
            wrapped = PeftModel(hf, LoraConfig.from_pretrained(str(directory)))
            added = {name for name, weight in wrapped.named_parameters(remove_duplicate=False) if id(weight) not in own}
            loaded = set_peft_model_state_dict(wrapped, load_file(directory / WEIGHTS), ignore_mismatched_sizes=True)
        except (ValueError, KeyError) as error:  # no module has a name of target_modules; or a whole module is missing
            raise _refusal(f"the adapter does not fit the model: {error}") from error
        if unplaced := [*loaded.unexpected_keys, *added.intersection(loaded.missing_keys)]:
            raise _refusal(f"the adapter does not fit the model, or its weights are missing: {unplaced[0]}")
        for layer in (hf.get_input_embeddings(), hf.get_output_embeddings()):
            if isinstance(layer, BaseTunerLayer):  # the two may share a weight, which the adapter changes in one alone
                base: Any = layer.get_base_layer()
                base.weight = torch.nn.Parameter(base.weight.detach().clone())
        return wrapped.merge_and_unload()


def _refusal(message: str) -> LoadError:
    return LoadError(message, "adapter", "unsupported_model")
