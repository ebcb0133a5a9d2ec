"""Keys, tenants, limits and origins are the same behind every door."""

from pathlib import Path
from typing import Any

import anthropic
import ollama
import pytest
from door_clients import anthropic_client, ollama_client, says
from fake_gateway import Play
from served import BYTE, Served, make_gateway
from tokenizers import Tokenizer

from c2cserve.runtime.gateway import Refused
from c2cserve.server.access.gate import Gate
from c2cserve.server.settings import AccessSettings, ServerSettings

HELLO: Any = [{"role": "user", "content": "hello"}]
ORIGIN = "https://chat.example"


@pytest.fixture(scope="module")
def locked(byte_dir: Path, piece_dir: Path) -> Any:
    settings = ServerSettings(access=AccessSettings(allowed_origins=(ORIGIN,)))
    with Served(make_gateway(byte_dir, piece_dir), settings, Gate(("right",))) as served:
        yield served


def test_anthropics_header_is_a_key(locked: Served, byte: Tokenizer) -> None:
    says(locked, byte, "hello")
    with anthropic_client(locked, "right") as client:
        client.messages.create(model=BYTE, max_tokens=9, messages=HELLO)
    tenant = locked.job.request.tenant
    assert tenant
    with ollama_client(locked, "right") as client:
        client.chat(model=BYTE, messages=HELLO)
        assert locked.job.request.tenant == tenant
    with anthropic_client(locked, "wrong") as client, pytest.raises(anthropic.AuthenticationError):
        client.messages.create(model=BYTE, max_tokens=9, messages=HELLO)
    # A bearer token is the key if there is one.
    both = {"authorization": "Bearer right", "x-api-key": "wrong"}
    assert locked.http.get("/api/tags", headers=both).status_code == 200


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/messages"), ("POST", "/v1/messages/count_tokens"), ("POST", "/v1/responses"),
        ("POST", "/api/chat"), ("POST", "/api/generate"), ("POST", "/api/show"),
        ("GET", "/api/tags"), ("GET", "/api/ps"),
    ],
)  # fmt: skip
def test_every_door_asks_for_a_key(locked: Served, method: str, path: str) -> None:
    answer = locked.http.request(method, path, json={} if method == "POST" else None)
    assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
    assert locked.http.get("/api/version").status_code == 200


def test_an_admin_key_is_a_bearer_token(byte_dir: Path, piece_dir: Path) -> None:
    settings = ServerSettings(admin_key="boss")
    with Served(make_gateway(byte_dir, piece_dir), settings) as served:
        assert served.http.get("/admin/models", headers={"x-api-key": "boss"}).status_code == 401


def test_origins_may_use_every_door(locked: Served) -> None:
    for path in ("/v1/messages", "/v1/responses", "/api/chat"):
        headers = {"origin": ORIGIN, "access-control-request-headers": "x-api-key"}
        answer = locked.http.options(path, headers=headers)
        assert answer.headers["access-control-allow-origin"] == ORIGIN
        assert answer.headers["access-control-allow-headers"] == "x-api-key"


def test_usage_is_counted(locked: Served, byte: Tokenizer) -> None:
    def used() -> int:
        rows = locked.http.get("/admin/usage").json()["usage"]
        return sum(row["output_tokens"] for row in rows)

    before, count = used(), says(locked, byte, "hello")
    with ollama_client(locked, "right") as client:
        client.generate(model=BYTE, prompt="x")
    assert used() == before + count


def test_a_refusal_says_when_to_come_back(locked: Served) -> None:
    locked.plays(lambda job: Play(refuse=Refused(503, "draining", 3.0)))
    with ollama_client(locked, "right") as client, pytest.raises(ollama.ResponseError) as refused:
        client.chat(model=BYTE, messages=HELLO)
    assert refused.value.status_code == 503
    with (
        anthropic_client(locked, "right") as client,
        pytest.raises(anthropic.InternalServerError) as later,
    ):
        client.messages.create(model=BYTE, max_tokens=9, messages=HELLO)
    assert later.value.response.headers["retry-after"] == "3"
