"""Which tensor files clients may upload; they are stored unchanged."""

from __future__ import annotations

import json
import os
import pickle

import pytest
import torch
from safetensors.torch import save

from deployments.activations.index.index import Index
from deployments.client_data.tensors import MAX_TENSORS, TensorFiles, check, pick
from deployments.errors import RequestError

ROOM = 1 << 20
FOLDER = TensorFiles.folder
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@pytest.fixture
def files(tmp_path):
    return TensorFiles(tmp_path)


@pytest.fixture
def sent(tmp_path_factory):
    """The path of a file with these bytes."""
    path = tmp_path_factory.mktemp("sent") / "file"
    return lambda data: path.write_bytes(data) and path or path


def written(header: dict, values: bytes = b"") -> bytes:
    """A file with a header of one's own."""
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + values


def of_one(dtype: str, shape: list[int], offsets: list[int], values: bytes) -> bytes:
    return written({"v": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}, values)


WHOLE = save({"v": torch.ones(4)})
BAD = {
    "empty": (b"", "complete"),
    "truncated": (WHOLE[:-1], "complete"),
    "longer than it says": (WHOLE + b"\0", "complete"),
    "a header without its end": (WHOLE[:20], "complete"),
    "a header of exabytes": (b"\xff" * 8 + WHOLE[8:], "header"),
    "offsets behind the end": (of_one("F32", [4], [0, 32], bytes(16)), "complete"),
    "offsets that do not fit the shape": (of_one("F32", [4], [0, 12], bytes(12)), "complete"),
    "offsets backwards": (of_one("F32", [4], [16, 0], bytes(16)), "complete"),
    "a shape past all bounds": (of_one("F32", [1 << 62, 8], [0, 16], bytes(16)), "complete"),
    "a gap": (of_one("F32", [4], [4, 20], bytes(20)), "complete"),
    "integers": (save({"v": torch.ones(4, dtype=torch.int64)}), "'v' is of dtype I64"),
    "eight bits": (save({"v": torch.ones(4).to(torch.float8_e4m3fn)}), "'v' is of dtype F8_E4M3"),
    "no dtype": (of_one("F33", [4], [0, 16], bytes(16)), "complete"),
    "nothing": (save({}), "1 to 64 tensors"),
    "too many": (save({f"v{i}": torch.ones(1) for i in range(MAX_TENSORS + 1)}), "1 to 64 tensors"),
    "a scalar": (save({"v": torch.tensor(1.0)}), "'v' has the shape"),
    "four dimensions": (save({"v": torch.ones(1, 1, 1, 1)}), "'v' has the shape"),
    "an empty tensor": (save({"fine": torch.ones(2), "v": torch.ones(0, 4)}), "'v' has the shape"),
    "no name": (save({"": torch.ones(2)}), "not a name"),
    "a name of lines": (save({"a\nb": torch.ones(2)}), "not a name"),
    "a pickle": (pickle.dumps({"v": [1.0, 2.0]}), "header"),
} | {
    f"{value} in {dtype}": (save({"fine": torch.ones(2), "v": torch.tensor([0, value]).to(dtype)}), "'v' holds a value")
    for dtype in DTYPES
    for value in (float("nan"), float("-inf"))
}


@pytest.mark.parametrize(("data", "says"), BAD.values(), ids=BAD)
def test_what_is_no_file_of_finite_floating_tensors_is_refused_by_name(files, sent, tmp_path, data, says):
    with pytest.raises(RequestError) as refused:
        files.put(sent(data), ROOM)
    assert (refused.value.status, refused.value.code) == (400, "invalid_tensor_file")
    assert says in refused.value.message
    assert files.list(10, None) == []
    assert not (tmp_path / FOLDER).exists()


def test_a_file_may_hold_all_that_is_allowed_at_once(sent):
    tensors = {f"v/{i}": torch.full((1, 2, 3)[: 1 + i % 3], 1.5, dtype=DTYPES[i % 4]) for i in range(MAX_TENSORS)}
    data = save(tensors)
    assert {name: (tuple(kind["shape"]), kind["dtype"]) for name, kind in check(sent(data)).items()} == {
        name: (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")) for name, tensor in tensors.items()
    }
    for name, tensor in tensors.items():
        found = pick(f"tensor-0/{name}", data)
        assert (found.dtype, found.device.type) == (tensor.dtype, "cpu")
        assert torch.equal(found, tensor)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_bit_is_kept_also_by_who_starts_again(files, sent, tmp_path, dtype):
    vector = torch.randn(3, 5).to(dtype)
    data = save({"v": vector}, {"made": "by hand"})
    kept = files.put(sent(data), ROOM)
    again = TensorFiles(tmp_path)
    assert files.read(kept["id"]) == again.read(kept["id"]) == data
    assert torch.equal(pick(kept["id"], data).view(torch.uint8), vector.view(torch.uint8))
    assert files.list(10, None) == again.list(10, None) == [kept]
    assert kept["tensors"] == {"v": {"shape": [3, 5], "dtype": str(dtype).removeprefix("torch.")}}


def test_who_starts_again_passes_over_links_strangers_and_what_a_crash_left(files, sent, tmp_path, caplog):
    kept = files.put(sent(WHOLE), ROOM)
    folder, outside = tmp_path / FOLDER, tmp_path / "outside.safetensors"
    outside.write_bytes(WHOLE)
    os.symlink(outside, folder / f"tensor-{'1' * 32}.safetensors")
    (folder / f"tensor-{'2' * 32}.safetensors").write_bytes(WHOLE[:-1])
    (folder / "notes.txt").write_text("mine")
    (folder / f".new-tensor-{'3' * 32}").write_bytes(WHOLE[:9])
    assert TensorFiles(tmp_path).list(10, None) == [kept]
    assert "2222" in caplog.text
    assert not (folder / f".new-tensor-{'3' * 32}").exists()
    assert (folder / "notes.txt").exists()


def test_tensor_files_are_no_session(files, sent, tmp_path):
    files.put(sent(WHOLE), ROOM)
    assert Index.scanned(tmp_path).sessions() == []


@pytest.mark.parametrize(("reference", "says"), [("id", "several"), ("id/c", "no tensor 'c'"), ("id/", "no tensor ''")])
def test_a_reference_that_means_no_one_tensor_says_which_there_are(reference, says):
    with pytest.raises(RequestError, match=says) as refused:
        pick(reference, save({"a": torch.ones(1), "b": torch.ones(1)}))
    assert refused.value.code == "tensor_not_found"
    assert "'a', 'b'" in refused.value.message
