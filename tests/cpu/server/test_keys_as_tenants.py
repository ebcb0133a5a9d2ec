"""Keys as tenants, and refusals before a request is looked into."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from served import BYTE, Served, make_gateway

from c2cserve.runtime.gateway import Refused
from c2cserve.server.settings import ServerSettings

BODY = {"model": BYTE, "prompt": "hello", "max_tokens": 3}


@pytest.fixture(scope="module")
def keyed(byte_dir: Path, piece_dir: Path) -> Iterator[Served]:
    settings = ServerSettings(api_keys=("first key", "second key"))
    with Served(make_gateway(byte_dir, piece_dir), settings) as served:
        yield served


def tenant_of(served: Served, key: str) -> str:
    served.says([70, 71, 72])
    headers = {"authorization": f"Bearer {key}"}
    assert served.http.post("/v1/completions", json=BODY, headers=headers).status_code == 200
    return served.job.request.tenant


def test_a_key_is_a_tenant_whose_name_does_not_tell_the_key(keyed: Served) -> None:
    first, second = tenant_of(keyed, "first key"), tenant_of(keyed, "second key")
    assert first == tenant_of(keyed, "first key") != second
    assert first
    assert "key" not in first


def test_without_keys_all_are_one_tenant(served: Served) -> None:
    assert tenant_of(served, "any") == ""


def test_in_an_overload_a_request_is_refused_before_it_is_tokenized(served: Served) -> None:
    served.gateway.overloaded = Refused(429, "it would come late", 7.2)
    jobs = len(served.gateway.jobs)
    # That this is no valid body is never found out.
    answer = served.http.post("/v1/completions", json={"model": BYTE, "prompt": {}})
    assert answer.status_code == 429
    assert answer.headers["retry-after"] == "8"
    assert answer.json()["error"]["code"] == "rate_limit_exceeded"
    assert len(served.gateway.jobs) == jobs
    assert served.gateway.gated[-1] == ("", 1.0, {})


def test_the_target_of_a_request_counts_and_others_on_their_way(served: Served) -> None:
    served.says([70])
    headers = {"x-slo-ttft-ms": "2500"}
    served.http.post("/v1/completions", json=BODY, headers=headers)
    assert served.gateway.gated[-1] == ("", 2.5, {})


def test_an_unknown_model_is_a_404_in_an_overload_too(served: Served) -> None:
    served.gateway.overloaded = Refused(429, "it would come late", 7.2)
    answer = served.http.post("/v1/completions", json={**BODY, "model": "none"})
    assert answer.status_code == 404
