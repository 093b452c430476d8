"""Tensor files that clients upload, below `<root>/.tensors/`, and single tensors of them."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load

from deployments.accounts import OPERATOR, Account
from deployments.client_data.files import ClientFile, ClientFiles, pieces_of
from deployments.errors import RequestError
from deployments.points.names import dtype_name

DTYPES = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64}
MAX_TENSORS = 64
MAX_DIMENSIONS = 3
MAX_NAME = 256
MAX_HEADER_BYTES = 1 << 20


class TensorFiles(ClientFiles):
    """Every tensor file below one root. Its id is made of its bytes and owner, so that the same is kept once."""

    folder, kind, verb, full = ".tensors", "tensor files", "send", "tensor_store_full"
    most_files = 1 << 16

    def described(self, path: Path) -> tuple[str, dict[str, Any]]:
        """What the header of a file says, which was checked when it was sent."""
        with safe_open(path, "pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - no mapping
            types = {name: _type(name, part.get_shape(), part.get_dtype()) for name, part in slices.items()}
        return path.name.partition(".")[0].partition("@")[0], {"tensors": types}

    def put(self, path: Path, most: int, account: Account = OPERATOR) -> dict[str, Any]:
        """Keep a copy of a file, as `keep`; RequestError if it may not be kept."""
        about, owner = {"tensors": check(path)}, account.owner
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256")
        if owner is not None:
            digest.update(f"@{owner}".encode())
        id = f"tensor-{digest.hexdigest()[:32]}"
        new = ClientFile(id, owner, id, path.stat().st_size, 0.0, about)
        return self.keep(new, pieces_of(path), most, account)


def check(path: Path) -> dict[str, dict[str, Any]]:
    """Shape and torch dtype of each tensor of a file that may be kept; RequestError names the one that may not.

    The header is checked first. The tensors are mapped, not read into memory.
    """
    try:
        with path.open("rb") as data:
            header_of(data)
        with safe_open(path, "pt") as file:
            names = list(file.keys())
            if not 1 <= len(names) <= MAX_TENSORS:
                raise _refused(f"a file holds 1 to {MAX_TENSORS} tensors, and this one {len(names)}")
            slices = {name: file.get_slice(name) for name in names}
            types = {name: _type(name, part.get_shape(), part.get_dtype()) for name, part in slices.items()}
            for name in names:
                if not is_finite(file.get_tensor(name)):
                    raise _refused(f"{name!r} holds a value that is not finite")
            return types
    except (SafetensorError, ValueError) as error:
        raise _refused(f"not a complete safetensors file: {error}") from error


def header_of(file: BinaryIO) -> bytes:
    """The JSON header of a safetensors file; ValueError if it would be too long."""
    length = int.from_bytes(file.read(8), "little")
    if length > MAX_HEADER_BYTES:
        raise ValueError(f"its header would be longer than {MAX_HEADER_BYTES} bytes")
    return file.read(length)


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether all values are finite, with little memory beside the tensor."""
    flat, step = tensor.reshape(-1), 1 << 20
    return all(bool(flat[at : at + step].isfinite().all()) for at in range(0, len(flat), step))


def split(reference: str) -> tuple[str, str | None]:
    """A file's id, and the name of a tensor of it, of `id/name`; no name where there is no `/`."""
    tensor_id, slash, name = reference.partition("/")
    return tensor_id, name if slash else None


def pick(reference: str, data: bytes) -> torch.Tensor:
    """The tensor `id` or `id/name` of a file, on the CPU; RequestError lists what there is if that means none."""
    tensors = load(data)
    _, name = split(reference)
    if name is None and len(tensors) == 1:
        (name,) = tensors
    if name is None or name not in tensors:
        there_are = ", ".join(repr(known) for known in sorted(tensors))
        wrong = "several tensors: name one as id/name" if name is None else f"no tensor {name!r}"
        raise RequestError(
            f"{reference!r}: the file has {wrong}; there are: {there_are}", None, "tensor_not_found", 404
        )
    return tensors[name]


def _type(name: str, shape: list[int], dtype: str) -> dict[str, Any]:
    if not 1 <= len(name) <= MAX_NAME or not name.isprintable():
        raise _refused(f"{name[:MAX_NAME]!r} is not a name of 1 to {MAX_NAME} printable characters")
    if dtype not in DTYPES:
        known = ", ".join(DTYPES)
        raise _refused(f"{name!r} is of dtype {dtype}: tensors here are one of {known}")
    if not 1 <= len(shape) <= MAX_DIMENSIONS or 0 in shape:
        raise _refused(
            f"{name!r} has the shape {shape}: tensors here have 1 to {MAX_DIMENSIONS} dimensions, none empty"
        )
    return {"shape": shape, "dtype": dtype_name(DTYPES[dtype])}


def _refused(message: str) -> RequestError:
    return RequestError(message, None, "invalid_tensor_file")
