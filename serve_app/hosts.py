"""By which names the server may be called, and by pages of which origins.

A website can have a browser send requests to a server that only its user's machine reaches: from a page of the site's
own origin, or by a name of the site's that resolves to 127.0.0.1. And a proxy on the same machine can pass on requests
from anywhere. A server without API keys tells them apart by these headers.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from urllib.parse import urlsplit

from starlette.datastructures import Headers

from deployments.exposure import is_loopback
from deployments.options import Options
from serve_app.errors import ApiError

CLIENTS = ("x-forwarded-for", "x-real-ip")  # headers in which proxies name who asked
OTHER_MARKS = ("via", "x-forwarded-proto", "x-forwarded-port", "x-forwarded-server")  # and others that only they send


class Hosts:
    """The names and origins that are allowed."""

    def __init__(self, options: Options, has_keys: bool) -> None:
        """Read the options.

        Args:
            options: The operator's.
            has_keys: Whether requests need an API key: a website has none, so any name will do.
        """
        self._any_name = has_keys or "*" in options.allowed_hosts
        self._any_address = options.open
        self._names = set(options.allowed_hosts)
        self._origins = {origin.lower() for origin in options.cors_origins}
        if options.public_url:
            url = urlsplit(options.public_url)
            self._names.add(url.hostname or "")
            self._origins.add(f"{url.scheme}://{url.netloc}".lower())

    def refusal(self, headers: Headers) -> ApiError | None:
        """Why a request with these headers is refused; None where it is not."""
        return self._of_origin(headers) or (None if self._any_name else self._of_names(headers))

    def _of_origin(self, headers: Headers) -> ApiError | None:
        origin = headers.get("origin")
        if origin is None or not self._origins.isdisjoint(("*", origin.lower())):
            return None
        if origin.partition("://")[2].lower() == headers.get("host", "").lower():
            return None
        message = (
            f"pages of {origin[:200]!r} may not use this server: its operator allows an origin with cors_origins, and "
            "names the server's own address behind a proxy with public_url"
        )
        return ApiError(403, message, "Origin", "origin_not_allowed")

    def _of_names(self, headers: Headers) -> ApiError | None:
        host = _hostname(headers.get("host", ""))
        if not self._is_allowed(host):
            return _refused("Host", host)
        told = [*_of_header(headers, "x-forwarded-host"), *_forwarded(headers, "host")]
        clients = [name for header in CLIENTS for name in _of_header(headers, header)] + [*_forwarded(headers, "for")]
        for name in told:
            if not self._is_allowed(name):
                return _refused("a forwarding header", name)
        is_proxied = told or clients or any(mark in headers for mark in ("forwarded", *OTHER_MARKS))
        # Who passes a name on may have got it from the client: it does not vouch for the client's address.
        if not is_proxied or not self._names.isdisjoint((host, *told)):
            return None
        stranger = next((name for name in clients or [""] if not is_loopback(name)), None)
        return None if stranger is None else _refused("a forwarding header", stranger)

    def _is_allowed(self, name: str) -> bool:
        return is_loopback(name) or name in self._names or (self._any_address and _is_address(name))


def _refused(header: str, name: str) -> ApiError:
    message = (
        f"this server has no API keys, so it answers only requests to this machine's own names, and {header} says "
        f"{name[:200]!r}: its operator sets keys with api_keys_file, or allows the name with allowed_hosts"
    )
    return ApiError(403, message, "Host", "host_not_allowed")


def _of_header(headers: Headers, name: str) -> Iterator[str]:
    """The hosts that a header lists, apart by commas, without ports."""
    for value in headers.getlist(name):
        yield from map(_hostname, value.split(","))


def _forwarded(headers: Headers, parameter: str) -> Iterator[str]:
    """The hosts that a parameter of `Forwarded` (RFC 7239) lists, without ports."""
    for value in headers.getlist("forwarded"):
        for pair in value.replace(",", ";").split(";"):
            name, _, host = pair.partition("=")
            if name.strip().lower() == parameter:
                yield _hostname(host.strip().strip('"'))


def _hostname(host: str) -> str:
    """A host without its port, in lower case; an empty string where it is none."""
    host = host.strip()
    if _is_address(host):  # an IPv6 address without brackets, as some proxies write it
        return host
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
