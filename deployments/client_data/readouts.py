"""Readouts on disk: `<root>/.readouts/<name>.safetensors` with the definition in the metadata. Names are per owner."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save

from deployments.accounts import OPERATOR, Account
from deployments.client_data.files import ClientFile, ClientFiles
from deployments.points.readouts import ReadoutSpec
from deployments.readouts.checks import Definition, define

_METADATA_KEY = "vitrine"  # of a file's metadata: the readout's id, the entries of a row that it reads, and its values


class ReadoutFiles(ClientFiles):
    """Every readout below one root."""

    folder, kind, verb, full = ".readouts", "readouts", "install", "readout_store_full"
    most_files = 1 << 10

    def described(self, path: Path) -> tuple[str, dict[str, Any]]:
        """What the file's metadata say."""
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
        id, hidden, values = json.loads(metadata[_METADATA_KEY])
        return id, _about(ReadoutSpec.model_validate_json(metadata["spec"]), hidden, values)

    def put(
        self,
        data: bytes,
        spec: Mapping[str, Any] | None,
        most: int,
        account: Account = OPERATOR,
    ) -> dict[str, Any]:
        """Store a readout with its spec, as `keep` does. RequestError if it is not a valid readout."""
        defined = define(data, spec)
        id = _id(defined)
        metadata = {"spec": _spec_json(defined.spec), _METADATA_KEY: json.dumps([id, defined.hidden, defined.size])}
        kept = save(defined.tensors, metadata)
        about = _about(defined.spec, defined.hidden, defined.size)
        new = ClientFile(defined.spec.name, account.owner, id, len(kept), 0.0, about)
        return self.keep(new, kept, most, account)


def _spec_json(spec: ReadoutSpec) -> str:
    return spec.model_dump_json(exclude_none=True, exclude_defaults=True)


def _id(defined: Definition) -> str:
    """Another one for other tensors or another spec."""
    digest = hashlib.sha256(_spec_json(defined.spec).encode())
    for name, tensor in sorted(defined.tensors.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return f"readout-{digest.hexdigest()[:32]}"


def _about(spec: ReadoutSpec, hidden: int, values: int) -> dict[str, Any]:
    said = spec.model_dump(mode="json", exclude_none=True, exclude_defaults=True)
    return {"object": "readout", **said, "activation": spec.activation, "hidden": hidden, "values": values}
