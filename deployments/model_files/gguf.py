"""GGUF files as directories that transformers can load: dequantized once and cached."""

from __future__ import annotations

import hashlib
import importlib.util
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from deployments.errors import LoadError
from deployments.model_files.made_once import made_once

CACHE_FOLDER = ".gguf"  # in the directory of models; clients cannot name models that start with a dot
GGUF_NEEDED = "reading a GGUF file needs the package gguf: pip install -c constraints.txt gguf"
FLOATS = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
ENDS = [f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom")]  # end tokens of a text, a turn, a message
MAX_ARRAY = 1000  # of an array of metadata; larger ones belong to the vocabulary
# How the text of a byte-level vocabulary is split before merging, by `tokenizer.ggml.pre`, if transformers uses only
# GPT-2's expression: those of `DIGITS` split off each digit first, those of `GPT2` use that expression alone. As in
# llama.cpp's `src/llama-vocab.cpp`.
DIGITS = {"codeshell", "command-r", "exaone", "minerva-7b", "refact", "smollm", "starcoder"}
GPT2 = {"exaone4", "gpt-2", "jais", "mpt", "olmo", "phi-2", "roberta-bpe", "trillion"}
# Vocabularies that start every text with a token and look up whole words first, as in the same file.
LLAMA3 = {"falcon3", "llama-bpe", "llama-v3", "llama3", "tekken"}
README_TEXT = """# {name}

Converted from the GGUF file `{file}`, sha256 {digest}.

Licence: {license}. The file's tensors are {types}; the weights here are their values, as {dtype}.
"""


def kept(file: Path, models_dir: Path) -> Path:
    """The directory of a converted GGUF file; each content and name is converted once.

    The content is identified by all its bytes: reading them takes less time than loading the weights, and detects
    copies and changes.

    Args:
        file: The file.
        models_dir: The parent of the directory `.gguf/NAME-DIGEST`.

    Raises:
        LoadError: The package gguf is missing, or transformers cannot read the file.
        OSError: The disk fails.
    """
    digest = sha256(file)
    directory = models_dir / CACHE_FOLDER / f"{file.stem}-{digest[:16]}"
    return made_once(directory, lambda into: convert(file, into, digest))


def check_installed() -> None:
    """Check that the package gguf is installed.

    Raises:
        LoadError: It is not; the message has the command that installs it.
    """
    if importlib.util.find_spec("gguf") is None:
        raise LoadError(GGUF_NEEDED, "model_id", "unsupported_model")


def sha256(file: Path) -> str:
    """A file's digest, 64 hex digits."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def convert(file: Path, into: Path, digest: str) -> None:
    """Convert a GGUF file to a Hugging Face directory; shows progress on stderr.

    Quantized weights are dequantized and rounded to bfloat16 once; a file of floats keeps its dtype and values.

    Args:
        file: The file.
        into: An empty directory.
        digest: The file's sha256.

    Raises:
        LoadError: The package gguf is missing, the file is not a GGUF file, or transformers cannot read all of it.
        OSError: The disk fails.
    """
    check_installed()
    with file.open("rb") as opened:
        if opened.read(4) != b"GGUF":
            raise LoadError(f"{file} is not a GGUF file", "model_id", "unsupported_model")
    from gguf import GGUFReader

    try:
        reader = GGUFReader(file)
        facts = {name: field.contents() for name, field in reader.fields.items() if len(field.data) < MAX_ARRAY}
        model = _model(file, reader.tensors, facts)
        tokenizer = tokenizer_of(file, facts, getattr(model.config, "max_position_embeddings", None))
    except (LoadError, OSError):
        raise
    except Exception as error:  # a truncated or foreign file can raise any error in the readers
        raise _refused(file, f"transformers cannot read it: {error}") from error
    model.save_pretrained(into)
    tokenizer.save_pretrained(into)
    (into / "README.md").write_text(_about(file, digest, reader.tensors, facts, model.dtype))


def _model(file: Path, tensors: list[Any], facts: dict[str, Any]) -> Any:
    """The model with dequantized weights, on the CPU."""
    _check_rotary(file, tensors, facts)
    loads: Any = AutoModelForCausalLM
    model, info = loads.from_pretrained(
        file.parent,
        gguf_file=file.name,
        quantization_config=GgufConfig(dequantize=True),  # otherwise the model cannot be saved
        dtype=_dtype(tensors),
        ignore_mismatched_sizes=True,  # rejected below, with the tensor's name
        output_loading_info=True,
        local_files_only=True,
    )
    if lacking := sorted(info["missing_keys"] | {name for name, *_ in info["mismatched_keys"]}):
        raise _refused(file, f"it has no weights that fit {lacking[0]}")
    _check_whole(file, tensors, model)
    ends = {facts[name] for name in ENDS if name in facts}
    if len(ends) > 1:
        model.generation_config.eos_token_id = sorted(ends)
    return model


def _dtype(tensors: list[Any]) -> torch.dtype:
    """The narrowest of the file's dtypes, or bfloat16 if some tensors are quantized."""
    types = {tensor.tensor_type.name for tensor in tensors}
    return next((dtype for name, dtype in FLOATS.items() if types <= FLOATS.keys() and name in types), torch.bfloat16)


def _check_rotary(file: Path, tensors: list[Any], facts: dict[str, Any]) -> None:
    """Reject a scaled rotary embedding, which transformers silently ignores."""
    architecture = facts["general.architecture"]
    scaling = facts.get(f"{architecture}.rope.scaling.type", "none")
    factors = [tensor for tensor in tensors if tensor.name.startswith("rope_") and (tensor.data != 1).any()]
    if factors or (scaling != "none" and architecture != "gpt-oss"):
        raise _refused(
            file,
            "its rotary embedding is scaled, and transformers does not read the scaling from a GGUF file",
        )


def _check_whole(file: Path, tensors: list[Any], model: Any) -> None:
    """Reject a file with weights that do not fit the model, which transformers silently ignores."""
    layers, tied = model.config.num_hidden_layers, getattr(model.config, "tie_word_embeddings", False)
    values = sum(
        int(tensor.n_elements)
        for tensor in tensors
        if not tensor.name.startswith("rope_")
        and not (tied and tensor.name == "output.weight")
        and not (tensor.name.startswith("blk.") and int(tensor.name.split(".")[1]) >= layers)  # for draft tokens
    )
    taken = sum(
        weight.numel() for weight in {weight.data_ptr(): weight for weight in model.state_dict().values()}.values()
    )
    if values != taken:
        raise _refused(file, f"it holds {values:,} weights, and transformers reads {taken:,} of them")


def _about(file: Path, digest: str, tensors: list[Any], facts: dict[str, Any], dtype: torch.dtype) -> str:
    types = Counter(tensor.tensor_type.name for tensor in tensors).most_common()
    return README_TEXT.format(
        name=file.stem,
        file=file.name,
        digest=digest,
        license=facts.get("general.license", "the file does not say"),
        types=", ".join(f"{count} {name}" for name, count in types),
        dtype=str(dtype).removeprefix("torch."),
    )


def _refused(file: Path, why: str) -> LoadError:
    return LoadError(f"{file} cannot be converted: {why}", "model_id", "unsupported_model")


def tokenizer_of(file: Path, facts: dict[str, Any], context: int | None) -> Any:
    """The tokenizer of a GGUF file with this metadata, which splits text like the model's own.

    Raises:
        LoadError: Its way of splitting text is unknown.
    """
    pre = facts.get("tokenizer.ggml.pre")
    begun = {"add_bos_token": True} if pre in LLAMA3 and "tokenizer.ggml.add_bos_token" not in facts else {}
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name, local_files_only=True, **begun)
    backend = tokenizer.backend_tokenizer
    if facts.get("tokenizer.ggml.model") == "gpt2" and isinstance(backend.pre_tokenizer, pre_tokenizers.ByteLevel):
        if pre in DIGITS:
            digits = pre_tokenizers.Digits(individual_digits=True)
            backend.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
        elif pre not in GPT2:
            message = f"{file} splits text by the pre-tokenizer {pre!r}, which is not supported"
            raise LoadError(message, "model_id", "unsupported_model")
    if pre in LLAMA3:
        backend.model.ignore_merges = True
    if context:
        tokenizer.model_max_length = context
    return tokenizer
