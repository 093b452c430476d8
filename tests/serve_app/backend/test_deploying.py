"""The options with which Serve starts the actors."""

from __future__ import annotations

import pytest

from deployments.options import Options
from serve_app.backend.deploying import environment


@pytest.mark.parametrize("option", ["max_body_bytes", "max_readout_file_bytes"])
def test_serve_takes_messages_as_large_as_the_largest_body(option):
    most = 1 << 30
    length = environment(Options(**{option: most}))["runtime_env"]["env_vars"][
        "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH"
    ]
    assert most < int(length) < 1 << 31, "gRPC has no longer messages"
