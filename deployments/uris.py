"""URIs of object storage, which must not contain keys."""

from __future__ import annotations

import re
from urllib.parse import parse_qsl, urlsplit

# What may stand before a host as a plain name: an Azure container, a user of HDFS, Google's `anonymous`.
_NAMED_BEFORE_HOST = frozenset({"abfs", "abfss", "hdfs", "viewfs", "gs", "gcs"})
# Settings of Arrow's file systems that are no keys; what is not known may be one.
_SETTINGS = frozenset(
    {
        *("region", "scheme", "endpoint_override", "force_virtual_addressing", "smart_defaults", "role_arn"),
        *("session_name", "allow_bucket_creation", "allow_bucket_deletion"),
        *("check_directory_existence_before_creation", "blob_storage_authority", "dfs_storage_authority"),
        *("blob_storage_scheme", "dfs_storage_scheme", "enable_tls", "credential_kind", "tenant_id", "client_id"),
        *("project_id", "retry_limit_seconds", "user", "replication", "buffer_size", "default_block_size"),
    }
)
_SETTING = re.compile(r"[][\w.:/+-]*")  # no address with a password, and no settings within a setting


def check_uri(uri: str) -> str:
    """Return a URI of object storage that holds no key.

    Raises:
        ValueError: It may hold one, or its bucket is a placeholder; the message says what to write, and does not repeat
            the URI.
    """
    url = urlsplit(uri)
    if "<" in url.netloc:
        raise ValueError(f"write the name of your bucket instead of {url.netloc}")
    name, _, host = url.netloc.rpartition("@")
    settings = parse_qsl(url.query, keep_blank_values=True)
    if (
        "@" in f"{name}{url.path}{url.query}"
        or url.fragment
        or (name and (url.scheme not in _NAMED_BEFORE_HOST or ":" in name))
        or not re.fullmatch(r"([^:]*|\[.*\])(:\d+)?", host)  # `id:key` where no bucket follows
        or not all(key in _SETTINGS and _SETTING.fullmatch(value) for key, value in settings)
    ):
        raise ValueError(
            "a URI must not contain keys, nor settings other than region, endpoint_override, scheme and the like: give "
            "S3's keys as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY or by the machine's role, and those of other "
            "storage in the environment; in a path write '@' as %40"
        )
    return uri
