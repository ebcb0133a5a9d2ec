"""Which requests may reuse each other's prefixes: hashes are equal for them, and for no others."""

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from served import BYTE, Served, make_gateway

from c2cserve.server.access.cache_salts import CacheSalts, cache_group, request_salt
from c2cserve.server.settings import AccessSettings, ServerSettings

PROMPT = "the same words in every request " * 4


def test_groups() -> None:
    names = {cache_group("a"), cache_group("b"), cache_group(""), cache_group("x", "a")}
    assert len(names) == 4, "no tenant shares with a group by being called like it"
    assert cache_group("a", "g") == cache_group("b", "g")


def test_salts() -> None:
    salts = CacheSalts()
    alone = salts.of_group("a")
    assert request_salt(alone, None) == alone == salts.of_group("a")
    different = {
        alone, salts.of_group("b"), salts.of_group(""), request_salt(alone, "b"),
        request_salt(salts.of_group("b"), "a"), request_salt(alone, "a"),
    }  # fmt: skip
    assert len(different) == 6
    assert CacheSalts().of_group("a") != alone, "no run's hashes help to guess another one's"


def serving(byte_dir: Path, piece_dir: Path, *, shared: bool) -> Served:
    settings = ServerSettings(
        api_keys=("key-a", "key-b"), access=AccessSettings(shared_cache=shared)
    )
    return Served(make_gateway(byte_dir, piece_dir), settings)


@pytest.fixture(scope="module")
def isolated(byte_dir: Path, piece_dir: Path) -> Iterator[Served]:
    with serving(byte_dir, piece_dir, shared=False) as served:
        yield served


@pytest.fixture(scope="module")
def shared(byte_dir: Path, piece_dir: Path) -> Iterator[Served]:
    with serving(byte_dir, piece_dir, shared=True) as served:
        yield served


def hashes(
    served: Served, key: str, salt: str | None = None, api: str = "completions"
) -> tuple[int, ...]:
    extra = {} if salt is None else {"cache_salt": salt}
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key=key, max_retries=0) as client:
        if api == "chat":
            messages = [{"role": "user", "content": PROMPT}]
            client.chat.completions.create(
                model=BYTE,
                messages=messages,
                max_tokens=1,
                extra_body=extra,  # pyright: ignore
            )
        else:
            client.completions.create(model=BYTE, prompt=PROMPT, max_tokens=1, extra_body=extra)
    found = served.job.request.prefix_hashes
    assert len(found) > 1
    return found


@pytest.mark.parametrize("api", ["completions", "chat"])
def test_keys_share_nothing(isolated: Served, api: str) -> None:
    mine = hashes(isolated, "key-a", api=api)
    assert hashes(isolated, "key-a", api=api) == mine
    assert not set(hashes(isolated, "key-b", api=api)) & set(mine)


@pytest.mark.parametrize("api", ["completions", "chat"])
def test_cache_salt_divides_a_key_s_requests(isolated: Served, api: str) -> None:
    plain, one, again, two = (
        hashes(isolated, "key-a", salt, api) for salt in (None, "1", "1", "2")
    )
    assert one == again
    assert not set(one) & set(two)
    assert not (set(one) | set(two)) & set(plain)
    assert not set(hashes(isolated, "key-b", "1", api)) & set(one), "a salt is a key's own"


def test_a_shared_cache(shared: Served) -> None:
    mine = hashes(shared, "key-a")
    assert hashes(shared, "key-b") == mine
    assert not set(hashes(shared, "key-b", "1")) & set(mine)


def test_without_keys_all_share(served: Served) -> None:
    assert hashes(served, "x") == hashes(served, "y")
    assert hashes(served, "x", "1") == hashes(served, "y", "1") != hashes(served, "x")


def test_tenants_are_named_and_their_keys_are_not_told(isolated: Served) -> None:
    tenants: list[str] = []
    for key in ("key-a", "key-b", "key-a"):
        hashes(isolated, key)
        tenants.append(isolated.job.request.tenant)
    assert tenants[0] == tenants[2] != tenants[1]
    assert all(one and "key" not in one for one in tenants)


@pytest.mark.parametrize("salt", ["", "x" * 257, 5, ["a"], {}, "\ud800"])
def test_a_wrong_salt_is_refused_by_name(served: Served, salt: object) -> None:
    for path, prompt in (
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
    ):
        body = {"model": BYTE, "cache_salt": salt, "max_tokens": 1, **prompt}
        if salt == "\ud800":
            content = b'{"model": "%s", "prompt": "a", "cache_salt": "\\ud800"}' % BYTE.encode()
            answer = served.http.post("/v1/completions", content=content)
            assert answer.status_code == 400
            continue
        answer = served.http.post(path, json=body)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "cache_salt"
