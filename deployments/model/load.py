"""Loads a model from the hub or a directory, and identifies the weights that it was loaded from."""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.hub import cached_file, extract_commit_hash

from deployments.model.model import Model
from deployments.model.weights import SharedWeights

BFLOAT16 = ("avx512_bf16", "amx_bf16", "arm_bf16")  # torch's names of a processor's instructions for it
# Files of a directory that determine a model's answers; not those of training, such as `training_args.bin`.
FILES = (
    *("*.safetensors", "pytorch_model*.bin", "*.index.json", "config.json", "generation_config.json", "*.py"),
    *("tokenizer*", "vocab*", "merges*", "*.model", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template*", "additional_chat_templates/*.jinja"),
)
PIECE_BYTES = 64 << 10
PIECES = 256  # of one file; files up to their total size are read completely

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
) -> Model:
    """Load a model from the hub or a directory.

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

    Raises:
        OSError: The repository or directory does not exist, or there is no memory to share.
        UnsupportedModelError: The model cannot be batched exactly.
    """
    source = str(Path(name).expanduser()) if Path(name).expanduser().is_dir() else name
    where = {"revision": revision, "trust_remote_code": trust_remote_code}
    tokenizer = AutoTokenizer.from_pretrained(source, **where)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device_map is None and device != "cpu":
        device_map = {"": device}  # a GPU gets the weights from the files, not through the host's memory
    hf: Any = AutoModelForCausalLM.from_pretrained(
        source,
        dtype=dtype,
        device_map=device_map,
        attn_implementation=None if attention == "auto" else attention,
        **where,
    )
    has_bfloat16 = any(map(torch.cpu.get_capabilities().get, BFLOAT16))
    if hf.device.type == "cpu" and hf.dtype == torch.bfloat16 and not has_bfloat16:
        logger.warning(
            "this processor has no instructions for bfloat16, the dtype of %s: with dtype=float32 it takes twice the "
            "memory and is several times as fast",
            name,
        )
    shared = SharedWeights.of(hf.eval()) if share else None  # before the module gets hooks
    return Model(hf, tokenizer, name, context, shared, revision_of(source, revision), batch_invariant)


def revision_of(source: str, asked: str | None = None) -> str | None:
    """The revision of a model that has just been loaded: a commit, or a digest of its files.

    Args:
        source: A directory or a repository of the hub.
        asked: The requested branch, tag or commit of the repository, if any.

    Returns:
        The commit of a repository, 40 hex digits. For a directory, `sha256:` and a digest of the names, sizes and bytes
        of the files that match `FILES`; for a file of more than 16 MiB, of 256 evenly spread pieces. None if the files
        can no longer be read.
    """
    try:
        if Path(source).is_dir():
            return f"sha256:{_digest(Path(source))}"
        config = cached_file(source, "config.json", revision=asked, local_files_only=True)
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
