"""The host names and origins from which the server accepts requests.

A website can make a browser send requests to a server that only the user's machine reaches: from a page of the site's
own origin, or through a host name of the site that resolves to 127.0.0.1. A proxy on the same machine can forward
requests from anywhere. Without API keys, the server recognizes such requests only by these headers.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from urllib.parse import urlsplit

from starlette.datastructures import Headers

from deployments.exposure import is_loopback
from deployments.options import Options
from serve_app.http.errors import ApiError

CLIENTS = ("x-forwarded-for", "x-real-ip")  # headers in which proxies name the client
OTHER_MARKS = ("via", "x-forwarded-proto", "x-forwarded-port", "x-forwarded-server")  # also sent only by proxies

MOST_HOSTS = 64  # host names in one header


class Hosts:
    """The allowed host names and origins."""

    def __init__(self, options: Options, has_keys: bool) -> None:
        """Read the options.

        Args:
            options: The operator's options.
            has_keys: Whether requests need an API key; a website has none, so any host name is then allowed.
        """
        self._any_name = has_keys or "*" in options.allowed_hosts
        self._any_address = options.open
        named = set(options.allowed_hosts)
        self._origins = {origin.lower() for origin in options.cors_origins}
        if options.public_url:
            url = urlsplit(options.public_url)
            named.add(url.hostname or "")
            self._origins.add(f"{url.scheme}://{url.netloc}".lower())
        # Loopback names are always allowed and do not indicate a proxy.
        self._names = {name for name in named if not is_loopback(name)}

    def refusal(self, headers: Headers) -> ApiError | None:
        """Why a request with these headers is rejected; None if it is accepted."""
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
            message = f"this server has no API keys and answers its own machine only, but Host is {host[:200]!r}"
            return _refused(f"{message}: the operator can set keys with api_keys_file, or allow the name")
        forwarded_names = [*_of_header(headers, "x-forwarded-host"), *_forwarded(headers, "host")]
        clients = [name for header in CLIENTS for name in _of_header(headers, header)] + [*_forwarded(headers, "for")]
        others = [name for name in forwarded_names if not self._is_allowed(name)]
        is_proxied = forwarded_names or clients or any(mark in headers for mark in ("forwarded", *OTHER_MARKS))
        # A proxy may copy a name from the client: such a name does not authenticate the client's address.
        if is_proxied and self._names.isdisjoint((host, *forwarded_names)):
            others += [name for name in clients or ["somebody"] if not is_loopback(name)]
        if not others:
            return None
        return _refused(
            f"this server has no API keys and answers its own machine only, but a proxy forwarded this request for "
            f"{others[0][:200]!r}: the operator can set keys with api_keys_file, or allow the proxy's name, which the "
            "proxy must send as Host or X-Forwarded-Host,"
        )

    def _is_allowed(self, name: str) -> bool:
        return is_loopback(name) or name in self._names or (self._any_address and _is_address(name))


def _refused(message: str) -> ApiError:
    return ApiError(403, f"{message} with allowed_hosts", "Host", "host_not_allowed")


def _of_header(headers: Headers, name: str) -> Iterator[str]:
    """The hosts in a comma-separated header, without ports; one empty string if it lists too many."""
    for value in headers.getlist(name):
        yield from map(_hostname, value.split(",") if value.count(",") < MOST_HOSTS else [""])


def _forwarded(headers: Headers, parameter: str) -> Iterator[str]:
    """The hosts in a parameter of `Forwarded` (RFC 7239), without ports; one empty string if it lists too many."""
    for value in headers.getlist("forwarded"):
        pairs = value.replace(",", ";")
        for pair in pairs.split(";") if pairs.count(";") < MOST_HOSTS else [f"{parameter}="]:
            name, _, host = pair.partition("=")
            if name.strip().lower() == parameter:
                yield _hostname(host.strip().strip('"'))


def _hostname(host: str) -> str:
    """A host without its port, in lower case; empty if it is malformed."""
    host = host.strip()
    if _is_address(host):  # an IPv6 address without brackets, as some proxies send it
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
