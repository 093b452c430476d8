"""Refuses to start a server on which other users could run code or read stored data.

There are two ways in. HTTP can require API keys. Ray's own ports, which every replica opens on all addresses and which
unpickle what they receive, can require Ray's token.
"""

from __future__ import annotations

import ipaddress
import os
import stat
from pathlib import Path

from deployments.errors import LoadError
from deployments.options import Options


def check_ray(options: Options) -> None:
    """Reject a Ray cluster whose ports take pickled calls from everyone.

    Raises:
        LoadError: Ray's token authentication is off in this process, and `insecure_ray` is not set.
    """
    # The test that the servers at Ray's ports use; there is no public one.
    from ray._private.authentication.authentication_utils import is_token_auth_enabled

    if options.insecure_ray or is_token_auth_enabled():
        return
    message = (
        "Ray's token authentication is off, so everybody who reaches a port of this machine can run code on it. Make a "
        "token with `ray get-auth-token --generate`, stop Ray and start it again with RAY_AUTH_MODE=token; or, where "
        "the network keeps all others out, set insecure_ray=true"
    )
    raise LoadError(message, "insecure_ray", "insecure_ray", 500)


def check_http(options: Options, has_keys: bool, host: str | None) -> None:
    """Raise if HTTP would answer everyone's requests, unless the operator allows it.

    Args:
        options: The operator's.
        has_keys: Whether requests need an API key.
        host: The address that Serve's proxies listen on; None for all of them.

    Raises:
        ValueError: Others could reach a server without keys, or pages of any origin could read its answers.
    """
    if has_keys:
        return
    if "*" in options.cors_origins:
        raise ValueError(
            "cors_origins=* without API keys lets every website that a user opens use this server: name the origins, "
            "or set keys with api_keys_file"
        )
    if is_loopback(host):
        return
    where = f"HTTP listens on {host or 'all addresses'} without API keys"
    keys = "set keys with api_keys_file or VITRINE_API_KEYS, or listen on 127.0.0.1 (`serve run` does)"
    if code := [name for name in ("allow_client_code", "allow_remote_code") if getattr(options, name)]:
        raise ValueError(f"{where}, and {code[0]} would let everybody run code on this machine: {keys}")
    if not options.open:
        raise ValueError(
            f"{where}, so everybody on the network could use this server and read and delete what it stores: {keys}; "
            "to allow this, set open=true"
        )


def is_loopback(host: str | None) -> bool:
    """Whether a name or address refers to this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host or "").is_loopback
    except ValueError:
        return False  # another name, or empty


def make_private(file: Path) -> None:
    """Make a file of this user private to this user; links are not followed, and missing files are ignored."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return  # missing, a link, or another user's
    try:
        state = os.fstat(descriptor)
        if stat.S_ISREG(state.st_mode) and state.st_uid == os.geteuid():
            os.fchmod(descriptor, 0o600)
    finally:
        os.close(descriptor)
