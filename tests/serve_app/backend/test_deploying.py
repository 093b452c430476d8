"""The options with which Serve starts the actors."""

from __future__ import annotations

import pytest
import ray

from deployments.errors import LoadError
from deployments.options import Options
from deployments.serve_actors import environment
from serve_app.backend import deploying
from serve_app.backend.deploying import loaded, replicas, with_gpus


def test_serve_takes_messages_as_large_as_the_largest_body():
    options = {"max_client_store_bytes": 16 << 30}
    most = 1 << 30
    length = environment(Options(**options))["runtime_env"]["env_vars"]["RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH"]
    assert most < int(length) < 1 << 31, "gRPC has no longer messages"


@pytest.fixture
def gpus(monkeypatch):
    """Makes a cluster have GPUs, of which some are free."""

    def make(has: float, free: float) -> None:
        monkeypatch.setattr(ray, "is_initialized", lambda: True)
        monkeypatch.setattr(ray, "cluster_resources", lambda: {"GPU": has} if has else {})
        monkeypatch.setattr(ray, "available_resources", lambda: {"GPU": free} if free else {})
        monkeypatch.setattr(deploying, "RELEASE_S", 0)

    return make


@pytest.mark.parametrize(
    ("given", "has", "takes"),
    [({}, 0, 0), ({}, 2, 1), ({"num_gpus": 0.5}, 2, 0.5), ({"num_gpus": 1}, 0, 1), ({"device": "cpu"}, 2, 0)],
)
def test_a_replica_takes_a_gpu_by_default_where_the_cluster_has_one(given, has, takes, gpus):
    gpus(has, free=0)
    assert with_gpus(Options(**given)).num_gpus == takes


def test_before_ray_starts_its_gpus_are_those_that_it_will_find(monkeypatch, tmp_path):
    monkeypatch.setattr(ray, "is_initialized", lambda: False)  # another test of this process may have started it
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))  # where no Ray runs
    for found in (0, 1):
        monkeypatch.setenv("RAY_OVERRIDE_RESOURCES", f'{{"GPU": {found}}}')
        assert with_gpus(Options()).num_gpus == found


def test_a_model_for_which_no_gpu_is_free_is_refused_with_the_numbers_unless_the_operator_set_one(gpus):
    gpus(has=2, free=0.5)
    with pytest.raises(LoadError, match=r"needed: 1, .* cluster: 2; free: 0.5. Unload .*=0.5") as refusal:
        loaded(Options())
    assert (refusal.value.status, refusal.value.code) == (409, "no_free_gpu")
    for given in ({"num_replicas": 3}, {"autoscaling": {"initial_replicas": 3, "max_replicas": 4}}):
        with pytest.raises(LoadError, match="needed: 3"):
            replicas(Options(**given))
    replicas(Options(autoscaling={"min_replicas": 0, "max_replicas": 4}))  # one starts
    loaded(Options(num_gpus=1, num_replicas=3))  # waits for a node


def test_the_address_of_a_ray_client_is_joined_not_read(monkeypatch):
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setenv("RAY_ADDRESS", "ray://127.0.0.1:1")
    monkeypatch.setattr(ray, "init", lambda address, **_: pytest.fail(f"joined {address}", pytrace=False))
    with pytest.raises(pytest.fail.Exception, match="joined ray://127.0.0.1:1"):
        with_gpus(Options())
