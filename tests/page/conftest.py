"""One headless Chromium for the tests of the page `/`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
import torch
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page
from safetensors.torch import save

from tests import browsers


# Not for the session: other tests of this process run event loops.
@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browsers.chromium() as browser:
        yield browser


@pytest.fixture
def opened(chromium: Browser, served: Any) -> Iterator[Callable[..., Page]]:
    """`opened(fragment, root=..., **context)`: the page in a window of its own; no script of it may fail."""
    contexts, failures = [], []

    def opened(fragment: str = "", root: str = served.root, **context: Any) -> Page:
        contexts.append(chromium.new_context(**context))
        page = contexts[-1].new_page()
        page.set_default_timeout(browsers.TIMEOUT_MS)
        page.on("pageerror", lambda error: failures.append(str(error)))
        page.on("console", lambda said: "Content Security Policy" in said.text and failures.append(said.text))
        browsers.show(page, f"{root}/{fragment}")
        return page

    yield opened
    for context in contexts:
        context.close()
    assert not failures, failures


@pytest.fixture(scope="module")
def install(served: Any) -> Iterator[Callable[..., None]]:
    """`install(tensors, name=..., **spec)`: a readout of the served model, or of `lenses`, until the module's end."""
    names: list[str] = []

    def install(tensors: dict[str, torch.Tensor], name: str, route: str = "readouts", **spec: object) -> None:
        form = {"spec": json.dumps(spec | {"name": name, "model": "vitrine-demo"})}
        files = {"file": ("readout.safetensors", save(tensors))}
        assert httpx.post(f"{served.base_url}/{route}", files=files, data=form, timeout=60).status_code == 200
        names.append(f"{route}/{name}")

    yield install
    for name in names:
        assert httpx.delete(f"{served.base_url}/{name}", timeout=60).json()["deleted"]


@pytest.fixture
def accessible() -> Callable[[Page, str], None]:
    """`accessible(page, view)`: no rule of axe is broken, in light and in dark; the page has to bypass its CSP."""

    def check(page: Page, view: str) -> None:
        results = [Axe().run(page)]
        page.emulate_media(color_scheme="dark")
        browsers.painted(page)
        results.append(Axe().run(page, options={"runOnly": ["color-contrast"]}))
        page.emulate_media(color_scheme="light")
        broken = [one for result in results for one in result.response["violations"]]
        assert not broken, f"{view}: {json.dumps([(one['id'], one['nodes'][0]['html'][:200]) for one in broken])}"

    return check
