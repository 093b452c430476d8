"""Who can reach the server: it refuses to start where strangers could run code or read what is stored."""

from __future__ import annotations

import ipaddress


def is_loopback(host: str | None) -> bool:
    """Whether a name or address means this machine to itself."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host or "").is_loopback
    except ValueError:
        return False  # another name, or none
