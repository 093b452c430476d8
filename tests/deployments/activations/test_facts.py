"""The identity of a store."""

from __future__ import annotations

from deployments.activations.facts import public_uri, store_id

AZURE = "account.dfs.core.windows.net/p"


def test_containers_of_one_account_and_buckets_of_two_servers_are_two_stores_whatever_the_settings():
    one, other = (f"abfs://{container}@{AZURE}" for container in ("one", "other"))
    assert store_id(one) != store_id(other)
    here, there = (f"s3://bucket/p?endpoint_override={host}:9000" for host in ("here", "there"))
    assert store_id(here) != store_id(there)
    assert store_id(here) == store_id(f"{here}&region=eu-west-1&scheme=http")


def test_of_a_uri_others_see_where_it_leads_and_no_settings():
    assert public_uri(f"abfs://one@{AZURE}/?credential_kind=environment") == f"abfs://one@{AZURE}"
    assert public_uri("/data/of what=ever?") == "/data/of what=ever?"
