"""Readouts on disk: stored by name and owner, found after a restart, bounded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load, save

from deployments.accounts import Account
from deployments.errors import RequestError
from deployments.readouts import files as readout_files
from deployments.readouts.files import ReadoutFiles

ANN, BOB, ADMIN = Account("ann", is_admin=False), Account("bob", is_admin=False), Account("root")
ROOM = 1 << 20


def probe(name: str = "truth", value: float = 1.0) -> bytes:
    spec = {"name": name, "model": "demo", "point": "layers.1.output", "kind": "linear"}
    return save({"weight": torch.full((1, 8), value)}, {"spec": json.dumps(spec)})


def test_a_readout_is_found_again_as_it_was_sent(tmp_path: Path) -> None:
    files = ReadoutFiles(tmp_path)
    kept = files.put(probe(), None, ROOM)
    assert files.put(probe(), None, ROOM) == kept
    again = ReadoutFiles(tmp_path)
    assert again.get("truth") == kept
    whole = again.read("truth") or b""
    assert torch.equal(load(whole)["weight"], torch.ones(1, 8))
    assert again.read("truth", first=3, end=9) == whole[3:9]
    assert [one["name"] for one in again.list(10, None)] == ["truth"]
    assert again.delete("truth")
    assert ReadoutFiles(tmp_path).get("truth") is None


def test_a_name_is_taken_until_it_is_free_again(tmp_path: Path) -> None:
    files = ReadoutFiles(tmp_path)
    files.put(probe(), None, ROOM)
    with pytest.raises(RequestError, match="already") as refused:
        files.put(probe(value=2.0), None, ROOM)
    assert refused.value.field == "spec.name"
    files.delete("truth")
    files.put(probe(value=2.0), None, ROOM)


def test_each_owner_has_names_of_their_own(tmp_path: Path) -> None:
    files = ReadoutFiles(tmp_path)
    first, second = (files.put(probe(value=value), None, ROOM, who)["id"] for value, who in ((1.0, ANN), (2.0, BOB)))
    again = ReadoutFiles(tmp_path)
    assert (again.get("truth", ANN) or {})["id"] == first
    assert (again.get("truth", BOB) or {})["id"] == second
    assert again.get("truth", ADMIN)
    assert again.delete("truth", BOB)
    assert again.get("truth", BOB) is None
    assert again.get("truth", ANN)


def test_a_start_reads_no_values_of_what_was_checked_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = ReadoutFiles(tmp_path).put(probe(), None, ROOM)

    def read(*_: object) -> None:
        raise AssertionError("the whole file is read")

    monkeypatch.setattr(readout_files, "define", read)
    assert ReadoutFiles(tmp_path).get("truth") == kept
