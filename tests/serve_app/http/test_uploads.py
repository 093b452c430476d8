"""No byte of an upload is read before there is room for it."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from serve_app.http.errors import ApiError
from serve_app.http.uploads import Uploads
from tests.serve_app.described import APP, send

TENSORS = {"content-type": "application/octet-stream"}


@pytest.mark.parametrize(("held", "asked", "fits"), [
    ([("ann", 60)], ("ann", 40), True),
    ([("ann", 60)], ("ann", 41), False),
    ([("ann", 60)], ("bob", 100), True),
    ([("ann", 100), ("bob", 60)], ("eve", 41), False),
])  # fmt: skip
def test_an_owner_and_all_together_have_only_so_many_bytes_on_their_way(held, asked, fits):
    uploads = Uploads(100)
    with ExitStack() as stack:
        for owner, size in held:
            stack.enter_context(uploads.hold(owner, size))
        if fits:
            stack.enter_context(uploads.hold(*asked))
        else:
            with pytest.raises(ApiError) as refused:
                stack.enter_context(uploads.hold(*asked))
            assert (refused.value.status, refused.value.code) == (429, "server_busy")
    with uploads.hold("eve", 100):  # what has ended does not count
        pass


@pytest.mark.parametrize("path", ["/v1/tensors", "/v1/readouts", "/v1/lenses", "/request"])
@pytest.mark.parametrize("length", ["2000000", None])
def test_an_upload_without_room_is_refused_before_it_is_read(path, length, monkeypatch):
    async def never():
        raise AssertionError("the body is read")
        yield b""

    monkeypatch.setitem(APP.state._state, "uploads", Uploads(999))
    kind = TENSORS if path == "/v1/tensors" else {"content-type": "multipart/form-data; boundary=x"}
    answer = send("POST", path, content=never(), headers=kind | ({"content-length": length} if length else {}))
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "server_busy")
    assert answer.headers["retry-after"]
