"""Hosts, origins, peers and media types: what is refused before any key is looked at."""

import gzip
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_gateway import FakeGateway
from served import BYTE, Served, make_gateway

from c2cserve.server.app import create_app
from c2cserve.server.guard import host_name, is_loopback
from c2cserve.server.settings import AccessSettings, ServerSettings

COMPLETION = {"model": BYTE, "prompt": "hello", "max_tokens": 3}
ENTRY = {"id": "org/new", "path": "/somewhere"}
FORM = "application/x-www-form-urlencoded"
APP = "https://app.example"
REMOTE = "10.0.0.9"


@pytest.fixture(scope="module")
def opened(byte_dir: Path, piece_dir: Path) -> Iterator[Served]:
    """A server that lets one origin use /v1, and one host lead to it."""
    access = AccessSettings(allowed_hosts=("serve.example",), allowed_origins=(APP,))
    with Served(make_gateway(byte_dir, piece_dir), ServerSettings(access=access)) as served:
        yield served


def error(answer: httpx.Response, status: int, code: str) -> str:
    assert answer.status_code == status, answer.text
    found = answer.json()["error"]
    assert found["code"] == code
    assert answer.headers["x-request-id"]
    return found["message"]


# ---- hosts --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:80", "127.0.0.1:9", "[::1]:9", "a.localhost"]
)
def test_hosts_of_this_machine(served: Served, host: str) -> None:
    assert served.http.get("/v1/models", headers={"host": host}).status_code == 200


@pytest.mark.parametrize("path", ["/v1/models", "/admin/state", "/metrics"])
@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "localhost.evil.example", ""])
def test_a_name_that_was_made_to_lead_here_is_refused(served: Served, path: str, host: str) -> None:
    answer = served.http.get(path, headers={"host": host})
    assert "--allowed-host" in error(answer, 403, "host_not_allowed")


@pytest.mark.parametrize("hosts", [("localhost", "evil.example"), ("evil.example", "localhost")])
def test_no_second_name_comes_with_a_good_one(served: Served, hosts: tuple[str, str]) -> None:
    fields = "".join(f"host: {host}\r\n" for host in hosts)
    with socket.create_connection(("127.0.0.1", served.port), 10) as connection:
        connection.sendall(f"GET /admin/state HTTP/1.1\r\n{fields}\r\n".encode())
        assert connection.recv(1000).startswith(b"HTTP/1.1 403")


def test_probes_ask_by_any_name(opened: Served) -> None:
    for path in ("/health", "/ready", "/version"):
        assert opened.http.get(path, headers={"host": "10.1.2.3:8000"}).status_code == 200


def test_allowed_hosts(opened: Served) -> None:
    for host in ("serve.example", "Serve.Example:8000", "localhost"):
        assert opened.http.get("/v1/models", headers={"host": host}).status_code == 200
    answer = opened.http.get("/v1/models", headers={"host": "other.example"})
    error(answer, 403, "host_not_allowed")


def test_names_of_hosts() -> None:
    assert [host_name(one) for one in ("A:1", "[::1]:80", "::1", "a")] == ["a", "::1", "::1", "a"]
    assert all(map(is_loopback, ("localhost", "127.8.8.8", "::1", "::ffff:127.0.0.1")))
    assert not any(map(is_loopback, ("", "0.0.0.0", "10.0.0.1", "::ffff:10.0.0.1", "localhost.a")))


# ---- origins ------------------------------------------------------------------------------------


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://localhost:1", "://"])
def test_web_pages_of_others_change_nothing(served: Served, origin: str) -> None:
    headers = {"origin": origin}
    for method, path, body in (
        ("POST", "/v1/completions", COMPLETION),
        ("POST", "/admin/models", ENTRY),
        ("POST", f"/admin/models/{BYTE}/reload", None),
        ("DELETE", f"/admin/models/{BYTE}", None),
    ):
        answer = served.http.request(method, path, json=body, headers=headers)
        assert "--allowed-origin" in error(answer, 403, "origin_not_allowed")
    assert (served.gateway.jobs, served.gateway.admin_calls) == ([], [])


def test_pages_of_the_server_s_own_origin(served: Served) -> None:
    headers = {"origin": served.url}
    assert served.http.post("/v1/completions", json=COMPLETION, headers=headers).status_code == 200


def test_no_answer_is_for_other_origins(served: Served) -> None:
    """There is no CORS by default: browsers show a page no answer of another origin."""
    preflight = {"origin": APP, "access-control-request-method": "POST"}
    answers = [
        served.http.get("/v1/models", headers={"origin": APP}),
        served.http.options("/v1/completions", headers=preflight),
    ]
    assert answers[1].status_code == 405
    for answer in answers:
        assert not [name for name in answer.headers if name.startswith("access-control")]


def test_an_allowed_origin_uses_v1(opened: Served) -> None:
    headers = {"origin": APP}
    preflight = opened.http.options(
        "/v1/completions", headers={**headers, "access-control-request-headers": "authorization"}
    )
    assert preflight.status_code == 204
    assert preflight.headers["access-control-allow-headers"] == "authorization"
    for answer in (
        preflight,
        opened.http.post("/v1/completions", json=COMPLETION, headers=headers),
        opened.http.post("/v1/completions", json={**COMPLETION, "stream": True}, headers=headers),
        opened.http.post("/v1/completions", json={"model": 5}, headers=headers),
    ):
        assert answer.headers["access-control-allow-origin"] == APP
        assert "origin" in answer.headers["vary"]
        assert "access-control-allow-credentials" not in answer.headers


def test_an_allowed_origin_does_not_use_admin(opened: Served) -> None:
    headers = {"origin": APP}
    answer = opened.http.post("/admin/models", json=ENTRY, headers=headers)
    error(answer, 403, "origin_not_allowed")
    for path in ("/admin/models", "/metrics"):
        answer = opened.http.get(path, headers=headers)
        assert "access-control-allow-origin" not in answer.headers
    assert opened.http.options("/admin/models", headers=headers).status_code == 405


def test_other_origins_stay_out(opened: Served) -> None:
    headers = {"origin": "https://evil.example"}
    for answer in (
        opened.http.options("/v1/completions", headers=headers),
        opened.http.post("/v1/completions", json=COMPLETION, headers=headers),
    ):
        error(answer, 403, "origin_not_allowed")
        assert "access-control-allow-origin" not in answer.headers


# ---- media types --------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/admin/models"])
@pytest.mark.parametrize("kind", [FORM, "text/plain", "multipart/form-data; boundary=a", ""])
def test_a_body_says_that_it_is_json(served: Served, path: str, kind: str) -> None:
    content = json.dumps(COMPLETION).encode()
    answer = served.http.post(path, content=content, headers={"content-type": kind})
    message = error(answer, 415, "unsupported_media_type")
    assert "-H 'content-type: application/json'" in message
    assert kind in message
    assert (served.gateway.jobs, served.gateway.admin_calls) == ([], [])


def test_clients_of_ollama_need_not_say_it(served: Served) -> None:
    """Its documentation shows curl's `-d`, and some clients send no type at all."""
    content = json.dumps({"model": "none", "prompt": "a"}).encode()
    for kind in (FORM, ""):
        fields = {"content-type": kind}
        assert served.http.post("/api/generate", content=content, headers=fields).status_code == 404
        for sign in ({"origin": "http://localhost:8000"}, {"sec-fetch-site": "none"}):
            answer = served.http.post("/api/generate", content=content, headers={**fields, **sign})
            assert answer.status_code in (403, 415)


@pytest.mark.parametrize("kind", ["application/json; charset=utf-8", "Application/JSON"])
def test_ways_to_say_it(served: Served, kind: str) -> None:
    content = json.dumps(COMPLETION).encode()
    answer = served.http.post("/v1/completions", content=content, headers={"content-type": kind})
    assert answer.status_code == 200


@pytest.mark.parametrize(
    ("field", "value"),
    [("content-encoding", "gzip"), ("content-encoding", "br"), ("transfer-encoding", "gzip")],
)
async def test_a_compressed_body_is_refused_by_name(
    gateway: FakeGateway, field: str, value: str
) -> None:
    content = gzip.compress(json.dumps(COMPLETION).encode())
    headers = {"content-type": "application/json", field: value}
    transport = httpx.ASGITransport(create_app(gateway, ServerSettings()))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        answer = await client.post("/v1/completions", content=content, headers=headers)
    assert f"{field}: {value!r}" in error(answer, 415, "unsupported_media_type")
    assert answer.json()["error"]["param"] == field


def test_a_body_may_say_that_it_is_not_compressed(served: Served) -> None:
    headers = {"content-encoding": "identity"}
    assert served.http.post("/v1/completions", json=COMPLETION, headers=headers).status_code == 200


def test_no_body_needs_no_type(served: Served) -> None:
    headers = {"content-type": FORM}
    answer = served.http.post(f"/admin/models/{BYTE}/reload", headers=headers)
    assert answer.status_code == 200


# ---- peers --------------------------------------------------------------------------------------


async def ask(
    gateway: FakeGateway, settings: ServerSettings, path: str, peer: str, **how: Any
) -> httpx.Response:
    """An answer to a peer that need not be on this machine."""
    transport = httpx.ASGITransport(create_app(gateway, settings), client=(peer, 5000))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        return await client.get(path, **how)


@pytest.fixture
def gateway(byte_dir: Path, piece_dir: Path) -> FakeGateway:
    return make_gateway(byte_dir, piece_dir)


WIDE = AccessSettings(loopback_only=False)


@pytest.mark.parametrize("path", ["/admin/state", "/admin/models", "/metrics"])
async def test_without_an_admin_key_only_local_peers(gateway: FakeGateway, path: str) -> None:
    for keys in ((), ("key-1",)):
        settings = ServerSettings(api_keys=keys, access=WIDE)
        headers = {"authorization": "Bearer key-1"}
        refused = await ask(gateway, settings, path, REMOTE, headers=headers)
        assert "C2CSERVE_ADMIN_KEY" in error(refused, 403, "local_only")
        for peer in ("127.0.0.1", "::1", "::ffff:127.0.0.1"):
            assert (await ask(gateway, settings, path, peer)).status_code == 200


async def test_a_local_peer_by_a_foreign_name_is_a_web_page(gateway: FakeGateway) -> None:
    settings = ServerSettings(access=WIDE)
    headers = {"host": "evil.example"}
    answer = await ask(gateway, settings, "/admin/state", "127.0.0.1", headers=headers)
    error(answer, 403, "host_not_allowed")
    assert (await ask(gateway, settings, "/v1/models", REMOTE, headers=headers)).status_code == 200


@pytest.mark.parametrize(
    "field", ["x-forwarded-for", "x-forwarded-host", "forwarded", "via", "x-real-ip"]
)
async def test_a_local_proxy_s_clients_are_not_local(gateway: FakeGateway, field: str) -> None:
    headers = {field: "127.0.0.1"}
    answer = await ask(gateway, ServerSettings(), "/admin/state", "127.0.0.1", headers=headers)
    error(answer, 403, "local_only")


async def test_open_metrics(gateway: FakeGateway) -> None:
    access = AccessSettings(loopback_only=False, open_metrics=True)
    for admin_key in ("", "root"):
        settings = ServerSettings(admin_key=admin_key, access=access)
        assert (await ask(gateway, settings, "/metrics", REMOTE)).status_code == 200
        status = (await ask(gateway, settings, "/admin/state", REMOTE)).status_code
        assert status == (401 if admin_key else 403)


async def test_an_admin_key_opens_it_to_all_peers(gateway: FakeGateway) -> None:
    settings = ServerSettings(admin_key="root", access=WIDE)
    for path in ("/admin/state", "/metrics"):
        assert (await ask(gateway, settings, path, "127.0.0.1")).status_code == 401
        headers = {"authorization": "Bearer root"}
        assert (await ask(gateway, settings, path, REMOTE, headers=headers)).status_code == 200


def test_settings_show_no_keys() -> None:
    assert "s3cret" not in repr(ServerSettings(api_keys=("s3cret",), admin_key="s3cret"))
