"""Readouts on disk: stored by name and owner, found after a restart, bounded."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load, save

from deployments.accounts import Account
from deployments.errors import RequestError
from deployments.readouts.files import LensFiles, ReadoutFiles, as_file, define_lens

ANN, BOB, ADMIN = Account("ann", is_admin=False), Account("bob", is_admin=False), Account("root")
ROOM = 1 << 20


@pytest.fixture
def probe(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The path of a probe's file."""
    path = tmp_path_factory.mktemp("sent") / "probe"

    def made(name: str = "truth", value: float = 1.0) -> Path:
        spec = {"name": name, "model": "demo", "point": "layers.1.output", "kind": "linear"}
        path.write_bytes(save({"weight": torch.full((1, 8), value)}, {"spec": json.dumps(spec)}))
        return path

    return made


def test_a_readout_is_found_again_as_it_was_sent(tmp_path: Path, probe: Callable[..., Path]) -> None:
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


def test_a_name_is_taken_until_it_is_free_again(tmp_path: Path, probe: Callable[..., Path]) -> None:
    files = ReadoutFiles(tmp_path)
    files.put(probe(), None, ROOM)
    with pytest.raises(RequestError, match="already") as refused:
        files.put(probe(value=2.0), None, ROOM)
    assert refused.value.field == "spec.name"
    files.delete("truth")
    files.put(probe(value=2.0), None, ROOM)


def test_each_owner_has_names_of_their_own(tmp_path: Path, probe: Callable[..., Path]) -> None:
    files = ReadoutFiles(tmp_path)
    first, second = (files.put(probe(value=value), None, ROOM, who)["id"] for value, who in ((1.0, ANN), (2.0, BOB)))
    again = ReadoutFiles(tmp_path)
    assert (again.get("truth", ANN) or {})["id"] == first
    assert (again.get("truth", BOB) or {})["id"] == second
    assert again.get("truth", ADMIN) is None
    assert not again.delete("truth", ADMIN)
    assert again.list(10, None, ADMIN) == []
    assert again.delete("truth", BOB)
    assert again.get("truth", BOB) is None
    assert again.get("truth", ANN)


def test_an_owner_leaves_others_as_much_room_as_it_has(tmp_path: Path, probe: Callable[..., Path]) -> None:
    files, room = ReadoutFiles(tmp_path), 6 * (probe().stat().st_size + 100)
    for number in range(3):
        files.put(probe(f"r{number}"), None, room, ANN)
    with pytest.raises(RequestError, match="each owner leaves as much as it takes"):
        files.put(probe("r3"), None, room, ANN)
    files.put(probe("r0"), None, room, BOB)


def test_a_lens_that_an_operator_puts_into_the_directory_has_the_name_of_its_file(tmp_path: Path) -> None:
    spec = {"name": "tuned", "model": "demo", "kind": "tuned", "card": {"tokens": 7}}
    _, data = as_file(define_lens(save({f"layers.{layer}.weight": torch.eye(8) for layer in (2, 0)}), spec))
    (tmp_path / ".lenses").mkdir()
    (tmp_path / ".lenses" / "v1.2@ann.safetensors").write_bytes(data)
    (found,) = LensFiles(tmp_path).list(2, None, ANN)
    assert (found["name"], found["layers"], found["hidden"], found["card"]) == ("v1.2", [0, 2], 8, {"tokens": 7})
