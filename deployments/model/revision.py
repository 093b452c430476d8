"""An identifier of the weights that a model was loaded from; it differs if the weights differ."""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path

from transformers.utils.hub import cached_file, extract_commit_hash

logger = logging.getLogger(__name__)
# Files of a directory that determine a model's answers; not those of training, such as `training_args.bin`.
FILES = (
    *("*.safetensors", "pytorch_model*.bin", "*.index.json", "config.json", "generation_config.json", "*.py"),
    *("tokenizer*", "vocab*", "merges*", "*.model", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template*", "additional_chat_templates/*.jinja"),
)
PIECE_BYTES = 64 << 10
PIECES = 256  # of one file; files up to their total size are read completely


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
