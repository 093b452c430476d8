"""An operator's API keys: who has access, who may load models, and that no key is shown."""

from __future__ import annotations

import json
import logging
from contextlib import closing

import httpx
import openai
import pytest
import websocket
from ray import serve

import serve_app
from deployments.client_code.job import CLASS
from deployments.options import Options
from serve_app.http.keys import VARIABLE, Keys, Role
from tests.serve_app.keyed import ADMIN, CODE, FROM_ENVIRONMENT, IN_FILE, ORIGIN, USE

CHAT = {"model": "vitrine-demo", "messages": [{"role": "user", "content": "2+2?"}], "max_tokens": 2}
# Routes that change the server for all, and what an admin gets for what is not there.
ADMINS = [
    ("POST", "/models/load", {"model_id": "tests/none", "trust_remote_code": True}, "remote_code_not_allowed"),
    ("POST", "/models/unload", {"model_id": "tests/none"}, "model_not_found"),
]


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Bearer"},
        bearer("sk-wrong-0000000000"),
        bearer(USE[:-1]),
        {"Authorization": USE},
        {"api-key": USE},
    ],
    ids=["none", "empty", "wrong", "shortened", "no scheme", "other header"],
)
@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/v1/nothing", "/v1/activations/sessions"])
def test_without_a_valid_key_every_route_answers_401(keyed, path, headers):
    answer = httpx.get(keyed + path, headers=headers, timeout=60)
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    assert answer.json()["error"]["code"] == "invalid_api_key"
    assert answer.json()["error"]["type"] == "authentication_error"


@pytest.mark.parametrize("key", [CODE, ADMIN])
def test_nnsights_client_comes_in_by_its_own_header(keyed, key):
    assert httpx.get(f"{keyed}/whoami", headers={"ndif-api-key": key}, timeout=60).json()["tags"]
    with closing(websocket.create_connection(f"ws{keyed[4:]}/subscribe", header={"ndif-api-key": key})) as socket:
        assert json.loads(socket.recv())["session_id"]


def refused(root: str, header: dict[str, str]) -> dict[str, str]:
    """Why a socket is refused: it opens, says so and closes."""
    socket = websocket.create_connection(f"ws{root[4:]}/subscribe", header=header)
    try:
        told = json.loads(socket.recv())
        assert told["session_id"] == ""
        assert socket.recv_data()[0] == websocket.ABNF.OPCODE_CLOSE
    finally:
        socket.shutdown()
    error: dict[str, str] = told["error"]
    return error


def test_a_key_without_the_role_runs_no_code_and_sees_no_job(keyed):
    header = {"ndif-api-key": USE, "nnsight-version": "0.8.1"}
    key = f'{CLASS}:{{"repo_id": "vitrine-demo"}}'
    data = {"data": json.dumps({"model_key": key})}
    for answer in (
        httpx.post(f"{keyed}/request", data=data, files={"blob": b"x"}, headers=header, timeout=60),
        httpx.get(f"{keyed}/response/{'0' * 32}", headers=header, timeout=60),
    ):
        assert answer.status_code == 403
        assert answer.json()["error"]["code"] == "insufficient_permissions"
        assert "role code" in answer.json()["detail"]  # what nnsight shows
    assert refused(keyed, {"ndif-api-key": USE})["code"] == "insufficient_permissions"
    for path in ("status", "env", "whoami"):
        assert httpx.get(f"{keyed}/{path}", headers=header, timeout=60).status_code == 200


@pytest.mark.parametrize("header", [{}, {"ndif-api-key": USE[:-1]}], ids=["none", "wrong"])
def test_without_a_valid_key_nobody_listens_and_no_code_is_taken(keyed, header):
    assert refused(keyed, header)["code"] == "invalid_api_key"
    headers = header | {"nnsight-version": "0.8.1"}
    answer = httpx.post(f"{keyed}/request", data={"data": "{}"}, files={"blob": b"x"}, headers=headers, timeout=60)
    assert answer.status_code == 401
    assert "NDIF_API_KEY" in answer.json()["detail"]  # what nnsight shows


@pytest.mark.parametrize("path", ["/health", "/docs", "/openapi.json"])
def test_health_and_the_documentation_need_no_key(keyed, path):
    assert httpx.get(keyed + path, timeout=60).status_code == 200


@pytest.mark.parametrize("key", [USE, ADMIN, FROM_ENVIRONMENT])
def test_openais_client_comes_in_by_its_api_key(keyed, key):
    with openai.OpenAI(base_url=f"{keyed}/v1", api_key=key, max_retries=0) as client:
        assert client.chat.completions.create(**CHAT).choices[0].finish_reason == "length"
    with (
        openai.OpenAI(base_url=f"{keyed}/v1", api_key=key + "x", max_retries=0) as client,
        pytest.raises(openai.AuthenticationError),
    ):
        client.models.list()


@pytest.mark.parametrize(
    ("method", "path", "body", "code"), ADMINS, ids=lambda value: value if str(value)[0] == "/" else ""
)
def test_only_an_admin_loads_and_unloads(keyed, method, path, body, code):
    def refused(key: str) -> tuple[int, str]:
        answer = httpx.request(method, keyed + path, json=body, headers=bearer(key), timeout=60)
        return answer.status_code, answer.json()["error"]["code"]

    for key in (USE, FROM_ENVIRONMENT):
        assert refused(key) == (403, "insufficient_permissions")
    assert refused(ADMIN)[1] == code


def test_a_running_server_takes_the_keys_of_a_changed_file(keyed, keys_file, eventually):
    new = "sk-new-8sHq2LpZx7"

    def statuses(*_):
        answers = [httpx.get(f"{keyed}/v1/models", headers=bearer(key), timeout=60) for key in (USE, new, ADMIN)]
        answers.append(httpx.get(f"{keyed}/whoami", headers={"ndif-api-key": CODE}, timeout=60))
        return [answer.status_code for answer in answers]

    assert statuses() == [200, 401, 200, 200]
    try:
        keys_file.write_text(f"use:{new} admin:{ADMIN}")
        eventually(statuses, lambda now: now == [401, 200, 200, 401])
    finally:
        keys_file.write_text(IN_FILE)
        eventually(statuses, lambda now: now == [200, 401, 200, 200])


def test_no_key_is_in_serves_status_or_any_log(keyed, served):
    httpx.get(f"{keyed}/v1/models", headers=bearer(USE), timeout=60)
    url, token = f"{served.cluster.dashboard}/api/serve/applications/", served.cluster.env["RAY_AUTH_TOKEN"]
    told = [str(serve.status()), httpx.get(url, headers=bearer(token), timeout=60).raise_for_status().text]
    logs = [
        path
        for path in served.cluster.directory.rglob("*")
        if path.is_file() and path.suffix in (".log", ".out", ".err")
    ]
    assert logs
    told += [path.read_text(errors="replace") for path in logs]
    for key in (USE, ADMIN, FROM_ENVIRONMENT):
        assert not any(key in text for text in told)


def test_a_page_of_the_allowed_origin_may_read_answers_and_refusals(keyed):
    asked = {"Origin": ORIGIN, "Access-Control-Request-Method": "POST"}
    asked |= {"Access-Control-Request-Headers": "authorization,content-type"}
    url = f"{keyed}/v1/chat/completions"
    preflight = httpx.options(url, headers=asked, timeout=60)
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-origin"] == ORIGIN
    for headers, status in (({}, 401), (bearer(USE), 200)):
        answer = httpx.post(url, json=CHAT, headers={"Origin": ORIGIN} | headers, timeout=60)
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (status, ORIGIN)
    other = httpx.options(url, headers=asked | {"Origin": "https://other.example"}, timeout=60)
    assert "access-control-allow-origin" not in other.headers


def test_without_the_option_no_page_may_read_anything(served):
    asked = {"Origin": ORIGIN, "Access-Control-Request-Method": "GET"}
    for answer in (
        httpx.options(f"{served.base_url}/models", headers=asked, timeout=60),
        httpx.get(f"{served.base_url}/models", headers={"Origin": ORIGIN}, timeout=60),
    ):
        assert "access-control-allow-origin" not in answer.headers


def test_the_documentation_says_which_routes_take_a_key(keyed, served):
    routes = httpx.get(f"{keyed}/openapi.json", timeout=60).json()["paths"]
    assert routes["/v1/models"]["get"]["security"]
    assert "401" in routes["/v1/models"]["get"]["responses"]
    assert "security" not in routes["/health"]["get"]
    assert "security" not in httpx.get(f"{served.root}/openapi.json", timeout=60).json()["paths"]["/v1/models"]["get"]


# ---- what is read


@pytest.fixture
def read(tmp_path, monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)

    def keys(text: str) -> Keys:
        (tmp_path / "keys").write_text(text)
        return Keys.read(str(tmp_path / "keys"))

    return keys


def test_a_file_and_the_environment_are_read_together(read, monkeypatch):
    monkeypatch.setenv(VARIABLE, f"use:{FROM_ENVIRONMENT}  admin:{ADMIN}")
    keys = read(f"  # one\nuse:{USE}")
    roles = [caller and caller.role for caller in map(keys.caller, map(str.encode, (USE, FROM_ENVIRONMENT, ADMIN)))]
    assert roles == [Role.USE, Role.USE, Role.ADMIN]
    assert keys.caller(b"sk-other-000000000") is None
    assert not Keys.read(None) if monkeypatch.delenv(VARIABLE) else True


@pytest.mark.parametrize(
    "text", ["", "# none\n", USE, f"king:{USE}", "use:short", f"use:{USE}\nadmin:{USE}", "use:sk-ümlaut-0000000000"]
)
def test_what_is_no_key_ends_the_deployment_and_is_not_repeated(read, text, caplog):
    with caplog.at_level(logging.DEBUG), pytest.raises(ValueError, match="key") as refused:
        read(text)
    assert USE not in str(refused.value) + caplog.text


@pytest.mark.parametrize(
    "change", ["", f"king:{USE}", "\udcff", None], ids=["empty", "malformed", "no text", "removed"]
)
def test_a_mistake_in_the_file_or_its_removal_changes_no_keys(read, tmp_path, monkeypatch, caplog, change):
    monkeypatch.setattr("serve_app.http.keys.LOOK_S", 0.0)
    path, keys = tmp_path / "keys", read(f"use:{USE}")
    if change is None:
        path.unlink()
    else:
        path.write_text(change, errors="surrogateescape")
    with caplog.at_level(logging.WARNING, "ray.serve"):
        assert [keys.caller(key) is not None for key in (USE.encode(), USE.encode(), b"", b"other")] == [
            True,
            True,
            False,
            False,
        ]
    assert len(caplog.records) == 1  # and not at each look
    assert keys
    assert USE not in caplog.text
    path.write_text(f"admin:{ADMIN}")
    assert keys.caller(USE.encode()) is None
    assert keys.caller(ADMIN.encode())


def test_a_name_outlives_its_key_and_a_key_without_one_is_an_owner_by_itself(read):
    keys = read(f"use@alice:{USE} code@alice:{FROM_ENVIRONMENT} admin:{ADMIN}")
    alice, with_new_key, admin = (keys.caller(key.encode()) for key in (USE, FROM_ENVIRONMENT, ADMIN))
    assert alice.owner == with_new_key.owner == "alice"
    assert with_new_key.may_run_code
    assert not alice.may_run_code
    assert admin.owner.startswith("key-")
    assert admin.owner == read(f"admin:{ADMIN}").caller(ADMIN.encode()).owner
    assert ADMIN not in admin.owner


@pytest.mark.parametrize("name", ["", "-a", "a/b", "key-1", "a" * 65, "a@b"])
def test_an_owners_name_can_stand_in_a_path_and_is_no_key(read, name):
    with pytest.raises(ValueError, match="name"):
        read(f"use@{name}:{USE}")


def test_an_empty_variable_or_a_missing_file_does_not_open_the_server(monkeypatch, tmp_path):
    with pytest.raises(FileNotFoundError):
        serve_app.build_app(Options(api_keys_file=str(tmp_path / "none")))
    monkeypatch.setenv(VARIABLE, "")
    with pytest.raises(ValueError, match=VARIABLE):
        serve_app.build_app(Options())


@pytest.mark.parametrize("given", ["app.example", "https://app.example/page", "ftp://app.example"])
def test_an_origin_is_a_scheme_and_a_host(given):
    with pytest.raises(ValueError, match="origin"):
        Options(cors_origins=given)
