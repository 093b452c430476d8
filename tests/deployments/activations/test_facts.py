"""What of a URI is secret, and what is left of it for others to read."""

from __future__ import annotations

import string
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.activations.facts import has_key, public_uri, store_id

AZURE = "account.dfs.core.windows.net/p"
SECRETS = st.text(string.ascii_letters + string.digits + "+/=:@?#", min_size=8).map(lambda text: f"s3cret{text}")


@pytest.mark.parametrize(
    ("uri", "public"),
    [
        ("s3://id:s3cret@bucket/p", "s3://bucket/p"),
        ("s3://s3cret@bucket/p", "s3://bucket/p"),
        ("https://s3cret@host/v", "https://host/v"),
        (f"abfs://container:s3cret@{AZURE}", f"abfs://container@{AZURE}"),
        (f"abfs://:s3cret@{AZURE}", f"abfs://{AZURE}"),
        (f"abfs://container@{AZURE}?account_key=s3cret", f"abfs://container@{AZURE}"),
        (f"abfs://container@{AZURE}?sig=s3cret&sv=2026", f"abfs://container@{AZURE}"),
        ("s3://bucket/p?Access_Key=s3cret", "s3://bucket/p"),
        ("s3://bucket/p?session_token=s3cret", "s3://bucket/p"),
        ("s3://bucket/p?password=s3cret&region=x", "s3://bucket/p"),
        ("s3://bucket/p?secret=s3cret", "s3://bucket/p"),
        ("s3://bucket/p?proxy_options=http://u:s3cret%40proxy", "s3://bucket/p"),
        ("https://host/v#token=s3cret", "https://host/v"),
        (f"abfs://container@{AZURE}#s3cret", f"abfs://container@{AZURE}"),
        ("s3://bucket/p?region=x;secret_key=s3cret", "s3://bucket/p"),
        ("s3://bucket/p?s3cret", "s3://bucket/p"),
        ("s3://bucket/p?sas=s3cret", "s3://bucket/p"),
        (f"abfs://container@{AZURE}?connection_string=AccountKey%3Ds3cret", f"abfs://container@{AZURE}"),
        ("s3://AKIA:s3cret/p", "s3:/p"),
    ],
)
def test_a_key_is_known_and_left_out(uri, public):
    assert has_key(uri)
    assert public_uri(uri) == public
    assert not has_key(public)


@pytest.mark.parametrize(
    "uri",
    [
        f"abfs://container@{AZURE}",
        f"abfss://container@{AZURE}?credential_kind=environment",
        "s3://bucket/p?region=eu-west-1&endpoint_override=host:9000&scheme=http",
        "s3://bucket/p?endpoint_override=%5B::1%5D:9000&allow_bucket_creation=true",
        "gs://anonymous@bucket/p",
        "hdfs://user@host:8020/p",
        "/data/of key=token@password",
    ],
)
def test_what_says_only_where_a_store_lies_is_no_key(uri):
    assert not has_key(uri)
    assert public_uri(uri) == uri.partition("?")[0]


def test_containers_of_one_account_are_two_stores_whatever_key_opens_them():
    one, other = (f"abfs://{container}:s3cret@{AZURE}" for container in ("one", "other"))
    assert store_id(one) != store_id(other)
    assert store_id(one) == store_id(one.replace(":s3cret", "")) == store_id(one.replace("s3cret", "t0ken"))


@given(
    secret=SECRETS.map(lambda text: quote(text, safe="")),
    scheme=st.sampled_from(["s3", "abfs", "gs", "https"]),
    form=st.sampled_from(["{s}://id:{k}@host/p", "{s}://host/p?secret_key={k}", "{s}://host/p?region=x&a_token={k}"]),
)
def test_no_escaped_key_is_left_in_what_is_shown(secret, scheme, form):
    uri = form.format(s=scheme, k=secret)
    assert has_key(uri)
    assert secret not in public_uri(uri)
