"""The body of a profile."""

from __future__ import annotations

from deployments.points.profiles import Profile
from serve_app.schemas.base import WireModel


class ProfileBody(WireModel, Profile):
    """`POST /v1/interventions`."""
