"""Tensor files over HTTP: stored unchanged, rejected by name, gone when deleted."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import load, save

from deployments.demo_model import WEIGHTS
from deployments.options import home

BYTES = {"content-type": "application/octet-stream"}
TENSORS = {"half": torch.randn(2, 8).bfloat16(), "whole": torch.randn(8)}


@pytest.fixture
def tensors(served):
    """Asks `/v1/tensors`, or one below it."""

    def ask(method: str, tensor_id: str = "", root: str = served.root, **request) -> httpx.Response:
        url = f"{root}/v1/tensors{tensor_id and '/'}{tensor_id}"
        return httpx.request(method, url, timeout=120, **request)

    return ask


@pytest.fixture
def kept(tensors):
    answer = tensors("POST", content=save(TENSORS), headers=BYTES)
    assert answer.status_code == 200, answer.text
    return answer.json()


def refused(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


def test_a_file_comes_back_as_it_was_sent(tensors, kept):
    answer = tensors("GET", kept["id"])
    assert answer.headers["content-type"] == "application/octet-stream"
    assert answer.content == save(TENSORS)
    for name, tensor in load(answer.content).items():
        assert torch.equal(tensor, TENSORS[name])
    assert kept["tensors"] == {
        "half": {"shape": [2, 8], "dtype": "bfloat16"},
        "whole": {"shape": [8], "dtype": "float32"},
    }
    assert tensors("POST", content=save(TENSORS), headers=BYTES).json() == kept


def test_files_are_listed_in_pages_and_deleted(tensors):
    ids = {
        tensors("POST", content=save({"v": torch.full((3,), float(i))}), headers=BYTES).json()["id"] for i in range(3)
    }
    listed = [file["id"] for file in tensors("GET", params={"limit": 1000}).json()["data"]]
    assert ids <= set(listed)
    assert listed == sorted(listed)
    page = tensors("GET", params={"limit": 1, "after": listed[0]}).json()
    assert [file["id"] for file in page["data"]] == listed[1:2]
    assert page["has_more"] is (len(listed) > 2)
    for tensor_id in ids:
        assert tensors("DELETE", tensor_id).json() == {"id": tensor_id, "object": "tensors", "deleted": True}
        assert refused(tensors("GET", tensor_id)) == (404, "tensor_not_found")
        assert refused(tensors("DELETE", tensor_id)) == (404, "tensor_not_found")


@pytest.mark.parametrize("kind", [None, "text/plain", "application/json"])
def test_what_is_not_sent_as_bytes_gets_400(tensors, kind):
    assert refused(tensors("POST", content=save(TENSORS), headers={"content-type": kind} if kind else {}))[0] == 400
    assert refused(tensors("POST", headers=BYTES))[0] == 400


def test_a_file_larger_than_any_other_body_may_be_is_kept_and_comes_back_in_pages(tensors):
    data = save({"v": torch.randn(15 << 20)})  # 60 MiB
    answer = tensors("POST", content=data, headers=BYTES)
    assert answer.status_code == 200, answer.text
    head = tensors("HEAD", answer.json()["id"])
    assert int(head.headers["content-length"]) == len(data)
    assert refused(tensors("GET", answer.json()["id"])) == (413, "range_required")
    body = bytearray()
    while len(body) < len(data):
        page = tensors("GET", answer.json()["id"], headers={"Range": f"bytes={len(body)}-"})
        assert page.status_code == 206
        body += page.content
    assert body == data
    assert tensors("DELETE", answer.json()["id"]).status_code == 200


def test_a_range_that_no_disk_can_seek_to_begins_after_the_end(served, tensors, kept):
    answer = tensors("GET", kept["id"], headers={"Range": "bytes=999999999999999999-"})
    assert refused(answer) == (416, "range_not_satisfiable")
    assert answer.headers["content-range"] == f"bytes */{kept['bytes']}"


@pytest.mark.parametrize("declared", [True, False])
def test_a_file_over_the_limit_gets_413(tensors, declared):
    piece = bytes(1 << 20)
    content = piece * 65 if declared else (piece for _ in range(65))
    assert refused(tensors("POST", content=content, headers=BYTES)) == (413, "tensor_too_large")


@pytest.mark.parametrize(
    "path", ["/v1/tensors/", "/v1/tensors/x", "/v1/chat/completions", "/v1//tensors", "/V1/tensors"]
)
def test_no_other_route_takes_more_for_it(served, path):
    headers = {"content-type": "application/json"}
    answer = httpx.post(served.root + path, content=bytes(17 << 20), headers=headers, timeout=60)
    assert refused(answer) == (413, "body_too_large")


@pytest.mark.parametrize(
    "tensor_id",
    [
        "none-such",
        "..%2F..%2Fsecret",
        "%2e%2e%2fsecret",
        "%2e%2e",
        "%2Fetc%2Fpasswd",
        "..%5Csecret",
        "x%00y",
        ".tensors%2Fx",
        "tensor-0%2F..%2F..%2Fsecret",
    ],
)
def test_an_id_names_nothing_but_a_file_of_the_store(served, tensors, kept, tensor_id):
    secret = Path(home() / "secret.safetensors")
    secret.write_bytes((WEIGHTS / "model.safetensors").read_bytes()[:100])
    for method in ("GET", "DELETE"):
        answer = tensors(method, tensor_id)
        assert answer.status_code in (404, 405), answer.text
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert secret.exists()
    assert tensors("GET", kept["id"]).status_code == 200


def test_the_operators_limits_hold(small_store, tensors):
    root, _ = small_store
    for number in range(17):  # each may take a sixteenth of the room
        answer = tensors("POST", root=root, content=save({"v": torch.full((320,), float(number))}), headers=BYTES)
        if answer.status_code != 200:
            break
    assert (number, refused(answer)) == (16, (400, "tensor_store_full"))
    too_large = save({"v": torch.ones(400)})
    assert refused(tensors("POST", root=root, content=too_large, headers=BYTES)) == (413, "tensor_too_large")


def test_a_models_structure_is_told_with_or_without_its_name(served):
    named = httpx.get(f"{served.base_url}/model/structure", params={"model": "vitrine-demo"}, timeout=60)
    assert named.status_code == 200, named.text
    told = named.json()
    assert told == httpx.get(f"{served.base_url}/model/structure", timeout=60).json()
    assert (told["id"], told["architecture"], told["layers"]) == ("vitrine-demo", "Qwen3ForCausalLM", 6)
    sites = {point["name"]: point for point in told["points"]}
    point = sites["layers.3.mlp.output"]
    assert (point["module"], point["shape"]) == ("model.layers.3.mlp.output", [told["hidden_size"]])
    assert told["modules"]["children"][0]["path"] == "model"
    body = {"model": "vitrine-demo", "prompt": "Tom has", "max_tokens": 1}
    wide = [name for name, point in sites.items() if "tokens" not in point["shape"]]  # patterns have no features
    capture = {"points": wide, "return": "inline", "tokens": "last", "features": {"first": 1}}
    answer = httpx.post(f"{served.base_url}/completions", json=body | {"capture": capture}, timeout=120).json()
    assert set(answer["activations_meta"]["runs"][0]["points"]) == set(wide)


def test_the_structure_of_no_model_is_404(served):
    answer = httpx.get(f"{served.base_url}/model/structure", params={"model": "none/such"}, timeout=60)
    assert refused(answer) == (404, "model_not_found")
