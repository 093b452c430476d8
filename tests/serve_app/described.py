"""The HTTP application without a backend, and its description, which takes a second to make."""

from __future__ import annotations

from types import SimpleNamespace

from deployments.options import Options
from serve_app.api import build_api
from serve_app.http.keys import Keys

APP = build_api(SimpleNamespace(data=None), Options(), Keys())  # type: ignore[arg-type]
DESCRIPTION = APP.openapi()
