"""The server refuses to start where other users could reach it, and says which option to set."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from deployments.errors import LoadError
from deployments.exposure import check_http, check_ray, is_loopback
from deployments.options import Options

HERE = ["127.0.0.1", "127.8.9.1", "::1", "localhost"]
ELSEWHERE = ["0.0.0.0", "::", "10.0.0.7", "vitrine.example", None]


@pytest.mark.parametrize("host", HERE)
@pytest.mark.parametrize("options", [{}, {"allow_client_code": True}, {"allow_remote_code": True}], ids=str)
def test_on_loopback_a_server_needs_no_keys(host, options):
    check_http(Options(**options), False, host)
    assert is_loopback(host)


@pytest.mark.parametrize("host", ELSEWHERE)
def test_elsewhere_it_needs_keys_or_the_operators_word(host):
    with pytest.raises(ValueError, match="api_keys_file.*open=true"):
        check_http(Options(), False, host)
    check_http(Options(), True, host)
    check_http(Options(open=True), False, host)


@pytest.mark.parametrize("host", ELSEWHERE)
@pytest.mark.parametrize("option", ["allow_client_code", "allow_remote_code"])
def test_no_option_lets_strangers_run_code(host, option):
    options = Options(**{option: True}, open=True)
    with pytest.raises(ValueError, match=f"{option}.*api_keys_file"):
        check_http(options, False, host)
    check_http(options, True, host)


def test_pages_of_any_origin_need_keys():
    with pytest.raises(ValueError, match="cors_origins"):
        check_http(Options(cors_origins="*"), False, "127.0.0.1")
    check_http(Options(cors_origins="*"), True, "127.0.0.1")


def test_ray_without_its_token_is_refused_with_the_command_that_makes_one():
    check_ray(Options())  # the tests' Ray has one
    lines = [
        "from deployments.exposure import check_ray",
        "from deployments.options import Options",
        "check_ray(Options(insecure_ray=True))",
        "check_ray(Options())",
    ]
    env: dict[str, Any] = {"RAY_AUTH_MODE": "disabled"}
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], env=env, capture_output=True, text=True)
    refused = LoadError.quoted(done.stderr)
    assert refused is not None, done.stderr
    assert refused.field == "insecure_ray"
    for command in ("ray get-auth-token --generate", "RAY_AUTH_MODE=token", "insecure_ray=true"):
        assert command in refused.message
