"""Keys over HTTP: two tenants, their limits, what they see, and what is counted."""

import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from fake_gateway import Play
from keys_file import Keys
from prometheus_client.parser import text_string_to_metric_families
from served import BYTE, PIECE, Served, make_gateway

from c2cserve.runtime.gateway import Refused, Superseded
from c2cserve.server.access.gate import Gate, show_duration
from c2cserve.server.settings import ServerSettings

COMPLETION: dict[str, Any] = {"model": BYTE, "prompt": "hello", "max_tokens": 3}
TOKENS = [50, 51, 52]


class World:
    """A server with a keys file, and clients with keys of it."""

    def __init__(self, served: Served, keys: Keys, log: Path) -> None:
        self.served, self.keys, self.log = served, keys, log
        self.clients: list[openai.OpenAI] = []

    def post(self, key: str, body: dict[str, Any] | None = None, **headers: str) -> httpx.Response:
        return self.served.http.post(
            "/v1/completions", json=COMPLETION if body is None else body,
            headers={"authorization": f"Bearer {key}", **headers},
        )  # fmt: skip

    def get(self, path: str, key: str = "") -> httpx.Response:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        return self.served.http.get(path, headers=headers)

    def client(self, key: str) -> openai.OpenAI:
        client = openai.OpenAI(base_url=f"{self.served.url}/v1", api_key=key, max_retries=0)
        self.clients.append(client)
        return client

    def add(self, name: str, **fields: Any) -> str:
        key = self.keys.add(name, **fields)
        assert self.reload().status_code == 200
        return key

    def reload(self) -> httpx.Response:
        return self.served.http.post("/admin/keys/reload")

    def shown(self, name: str) -> dict[str, Any]:
        listed = self.get("/admin/keys").json()["keys"]
        return next(one for one in listed if one["name"] == name)

    def running(self, name: str) -> int:
        return self.shown(name)["running"]

    def metric(self, name: str, **labels: str) -> float:
        families = text_string_to_metric_families(self.get("/metrics").text)
        return sum(
            sample.value
            for family in families
            for sample in family.samples
            if sample.name == f"c2cserve:{name}" and labels.items() <= sample.labels.items()
        )

    def used(self, name: str) -> dict[str, int]:
        """Summed over models."""
        rows = [one for one in self.get("/admin/usage").json()["usage"] if one["key"] == name]
        fields = ("requests", "prompt_tokens", "cached_tokens", "output_tokens")
        return {field: sum(row[field] for row in rows) for field in fields}


@pytest.fixture(scope="module")
def _world(
    byte_dir: Path, piece_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[World]:
    directory = tmp_path_factory.mktemp("keys")
    keys, log = Keys(directory / "keys.json"), directory / "usage.jsonl"
    keys.add("first")
    gate = Gate((), keys.path, log)
    with Served(make_gateway(byte_dir, piece_dir), ServerSettings(), gate) as served:
        world = World(served, keys, log)
        yield world
        for client in world.clients:
            client.close()


@pytest.fixture
def world(_world: World) -> Iterator[World]:
    """One server for all tests, which name their keys differently: counters are kept by name."""
    _world.served.says(TOKENS)
    before = _world.keys.path.read_bytes()
    yield _world
    _world.keys.path.write_bytes(before)
    _world.reload()


def error_of(answer: httpx.Response, status: int, code: str) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == code
    return error


def wait_until(check: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 10
    while not check():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


# ---- who asks -----------------------------------------------------------------------------------


def test_wrong_keys_are_openais_401(world: World) -> None:
    right = world.keys.texts["first"]
    for key in (right[:-1], right + "0", "c2c_" + "0" * 12 + "_" + "0" * 48, "sk-none"):
        with pytest.raises(openai.AuthenticationError) as caught:
            world.client(key).models.list()
        assert caught.value.code == "invalid_api_key"
        assert caught.value.type == "invalid_request_error"
        assert caught.value.response.headers["www-authenticate"] == "Bearer"
        assert key not in caught.value.response.text
    answer = world.served.http.post("/v1/completions", json=COMPLETION)
    assert answer.status_code == 401
    assert "did not provide" in answer.json()["error"]["message"]
    assert world.client(right).completions.create(**COMPLETION).usage is not None


def test_the_scheme_in_any_case(world: World) -> None:
    for scheme in ("bearer", "BEARER", "Bearer"):
        header = {"authorization": f"{scheme} {world.keys.texts['first']}"}
        assert world.served.http.get("/v1/models", headers=header).status_code == 200


def test_no_key_is_in_the_log(world: World, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    right, wrong = world.keys.texts["first"], "sk-wrong-0123456789"
    limited = world.add("limited", limits={"requests_per_minute": 1})
    for key in (right, wrong, limited, limited):
        world.post(key)
    assert world.post(right, {**COMPLETION, "temperature": 9}).status_code == 400
    lines = [str(vars(record)) for record in caplog.records]
    shown = "\n".join(lines) + world.get("/admin/keys").text + world.get("/metrics").text
    for text in (right, wrong, limited):
        assert text not in shown
        assert text[-20:] not in shown
    assert any("'key': 'first'" in line for line in lines), "but its name is"
    assert len(world.keys.records) == 2
    for record in world.keys.records:
        assert record.sha256 not in shown
        assert record.salt not in shown


# ---- limits -------------------------------------------------------------------------------------


def test_requests_per_minute(world: World) -> None:
    key = world.add("slow", limits={"requests_per_minute": 2})
    client = world.client(key)
    raw = client.completions.with_raw_response.create(**COMPLETION)
    assert raw.headers["x-ratelimit-limit-requests"] == "2"
    assert raw.headers["x-ratelimit-remaining-requests"] == "1"
    assert 25 < float(raw.headers["x-ratelimit-reset-requests"].removesuffix("s")) <= 30
    assert "x-ratelimit-limit-tokens" not in raw.headers
    assert world.post(key, {**COMPLETION, "temperature": 9}).status_code == 400, "counts as well"
    with pytest.raises(openai.RateLimitError) as caught:
        client.completions.create(**COMPLETION)
    error, headers = caught.value, caught.value.response.headers
    assert (error.code, error.param) == ("rate_limit_exceeded", "requests_per_minute")
    assert "'slow'" in str(error)
    assert 25 < int(headers["retry-after"]) <= 30
    assert headers["x-ratelimit-remaining-requests"] == "0"
    assert world.post(world.keys.texts["first"]).status_code == 200, "the other key has its own"
    assert client.models.list().data, "listing models is not counted"
    assert world.metric("key_refused_total", key="slow", limit="requests_per_minute") == 1
    assert world.metric("key_refused_total", key="first") == 0


def test_tokens_per_minute(world: World) -> None:
    key = world.add("few", limits={"tokens_per_minute": 30})
    first = world.post(key)
    usage = first.json()["usage"]
    prompt, total = usage["prompt_tokens"], usage["total_tokens"]
    assert first.headers["x-ratelimit-limit-tokens"] == "30"
    left = 30 - total
    assert left <= int(first.headers["x-ratelimit-remaining-tokens"]) <= left + 1
    while left >= prompt:
        assert world.post(key).status_code == 200
        left -= total
    refused = world.post(key)
    assert error_of(refused, 429, "rate_limit_exceeded")["param"] == "tokens_per_minute"
    assert 1 <= int(refused.headers["retry-after"]) <= 60
    many = {**COMPLETION, "prompt": [50] * 31}
    fresh = world.add("fresh", limits={"tokens_per_minute": 30})
    error = error_of(world.post(fresh, many), 400, "limit_exceeded")
    assert error["param"] == "prompt"
    assert "tokens_per_minute" in error["message"]
    assert "31" in error["message"]


def test_output_may_bring_a_key_into_debt(world: World) -> None:
    world.served.says([50] * 40)
    key = world.add("debtor", limits={"tokens_per_minute": 20})
    answer = world.post(key, {**COMPLETION, "max_tokens": 40})
    total = answer.json()["usage"]["total_tokens"]
    assert answer.status_code == 200, "an answer under way is not cut"
    refused = world.post(key)
    error_of(refused, 429, "rate_limit_exceeded")
    debt_s = (total - 20) * 60 / 20
    assert debt_s - 5 < int(refused.headers["retry-after"]) <= debt_s + 4


def test_output_is_charged_as_it_comes(world: World) -> None:
    key = world.add("streamer", limits={"tokens_per_minute": 1000})
    world.served.says(TOKENS, forever=True, delay_s=0.01)
    stream = world.client(key).completions.create(stream=True, **{**COMPLETION, "max_tokens": 200})
    left = list[int]()
    for number, _ in enumerate(stream):
        if number % 20 == 0:
            left.append(world.shown("streamer")["remaining"]["tokens_per_minute"])
        if len(left) == 4:
            break
    stream.close()
    # 17 a second come back; each look is 20 pieces of 1 token after the last one, 0.2 s or more.
    assert left == sorted(left, reverse=True)
    assert left[0] - left[-1] >= 30


def test_what_reached_no_slice_is_given_back(world: World) -> None:
    key = world.add("refunded", limits={"tokens_per_minute": 1000, "concurrency": 5})
    for refusal in (Refused(429, "full", 1.0), Refused(503, "down")):
        world.served.plays(lambda job, refusal=refusal: Play(refuse=refusal))
        answer = world.post(key, {**COMPLETION, "n": 3})
        assert answer.status_code == refusal.status
        assert int(answer.headers["x-ratelimit-remaining-tokens"]) == 1000
    assert world.running("refunded") == 0
    assert world.used("refunded")["requests"] == 0


def test_concurrency_counts_choices(world: World) -> None:
    key = world.add("narrow", limits={"concurrency": 3})
    world.served.says(TOKENS, forever=True, delay_s=0.01)
    client = world.client(key)
    body = {**COMPLETION, "max_tokens": 100}
    stream = client.completions.create(stream=True, n=2, **body)
    next(iter(stream))
    assert world.running("narrow") == 2
    answer = world.post(key, {**body, "n": 2})
    assert error_of(answer, 429, "rate_limit_exceeded")["param"] == "concurrency"
    assert int(answer.headers["retry-after"]) >= 1
    second = client.completions.create(stream=True, **body)
    next(iter(second))
    assert error_of(world.post(key), 429, "rate_limit_exceeded")["param"] == "concurrency"
    error = error_of(world.post(key, {**body, "n": 4}), 429, "rate_limit_exceeded")
    assert error["param"] == "concurrency", "before its body is read"
    stream.close()
    second.close()
    wait_until(lambda: world.running("narrow") == 0)
    error = error_of(world.post(key, {**body, "n": 4}), 400, "limit_exceeded")
    assert error["param"] == "n"
    assert world.metric("key_running", key="narrow") == 0
    world.served.says(TOKENS)
    assert world.post(key, {**body, "n": 3}).status_code == 200


def test_places_are_given_back_however_a_request_ends(world: World) -> None:
    key = world.add("placed", limits={"concurrency": 1})
    none = {**COMPLETION, "model": "none"}
    long = {**COMPLETION, "prompt": [50] * 500}
    for body, status in ((none, 404), (long, 400), ({}, 400), ({**COMPLETION, "n": 2}, 400)):
        assert world.post(key, body).status_code == status
        assert world.running("placed") == 0
    world.served.says(TOKENS, fail_after=0)
    assert world.post(key).status_code == 500
    world.served.says(TOKENS, forever=True, delay_s=0.02)
    with pytest.raises(openai.APITimeoutError):
        world.client(key).with_options(timeout=0.2).completions.create(
            **{**COMPLETION, "max_tokens": 200}
        )
    wait_until(lambda: world.running("placed") == 0)
    world.served.says(TOKENS)
    assert world.post(key).status_code == 200


def test_places_of_clients_that_leave_at_any_moment(world: World) -> None:
    key = world.add("fickle", limits={"concurrency": 1000})
    world.served.says(TOKENS, forever=True, delay_s=0.005)
    for number in range(60):
        body = {**COMPLETION, "max_tokens": 200, "n": 1 + number % 3, "stream": number % 2 == 0}
        content = json.dumps(body).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {key}\r\n"
            f"content-length: {len(content)}\r\n\r\n"
        ).encode()
        with socket.create_connection(("127.0.0.1", world.served.port)) as client:
            client.sendall((head + content)[: -1 if number % 7 == 0 else None])
            time.sleep(0.001 * (number % 20))
    wait_until(lambda: world.running("fickle") == 0)


def test_a_request_that_is_prepared_again_is_charged_once(world: World) -> None:
    key = world.add("again", limits={"tokens_per_minute": 1000, "concurrency": 1})
    superseded = iter([True, True, False])
    world.served.plays(lambda job: Play(TOKENS, refuse=Superseded() if next(superseded) else None))
    answer = world.post(key)
    assert answer.status_code == 200
    left = 1000 - answer.json()["usage"]["total_tokens"]
    assert left <= int(answer.headers["x-ratelimit-remaining-tokens"]) <= left + 2
    assert world.used("again")["requests"] == 1
    assert world.running("again") == 0


def test_models(world: World) -> None:
    key = world.add("org", limits={"models": ["org/*"]})
    client = world.client(key)
    assert [model.id for model in client.models.list()] == [BYTE]
    assert len(world.client(world.keys.texts["first"]).models.list().data) == 2
    assert client.models.retrieve("nick").id == BYTE
    for call in (
        lambda: client.models.retrieve(PIECE),
        lambda: client.completions.create(**{**COMPLETION, "model": PIECE}),
        lambda: client.chat.completions.create(
            model=PIECE, messages=[{"role": "user", "content": "x"}]
        ),
    ):
        with pytest.raises(openai.PermissionDeniedError) as caught:
            call()
        assert (caught.value.code, caught.value.param) == ("model_not_allowed", "model")
    for path, more in (("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [1]})):
        headers = {"authorization": f"Bearer {key}"}
        statuses = [
            world.served.http.post(path, json={"model": one, **more}, headers=headers).status_code
            for one in (BYTE, PIECE)
        ]
        assert statuses == [200, 403]
    for name, meant in (("pieces", False), ("bytes", True)):
        with pytest.raises(openai.NotFoundError) as unknown:
            client.models.retrieve(name)
        assert ("did you mean" in str(unknown.value)) == meant, "no name that it may not use"
    assert world.post(key, {**COMPLETION, "model": "nick"}).status_code == 200, "an alias of one"
    assert world.post(key, {**COMPLETION, "model": "none"}).status_code == 404
    twice = json.dumps(COMPLETION)[:-1] + f', "model": "{PIECE}"}}'
    answer = world.served.http.post(
        "/v1/completions", content=twice, headers={"authorization": f"Bearer {key}"}
    )
    assert answer.status_code in (400, 403), "which of two names counts is not a way around"
    assert world.metric("key_refused_total", key="org", limit="models") >= 3


def test_priority_and_targets(world: World) -> None:
    limits = {"max_priority": 1, "min_ttft_ms": 500, "min_tpot_ms": 50}
    key = world.add("modest", limits=limits)
    assert world.post(key).status_code == 200, "the model's own priority, 3, is the operator's"
    assert world.post(key, {**COMPLETION, "priority": 1}).status_code == 200
    assert world.served.job.request.priority == 1
    error = error_of(world.post(key, {**COMPLETION, "priority": 2}), 403, "priority_not_allowed")
    assert error["param"] == "priority"
    for header, fine, tight in (("x-slo-ttft-ms", 500, 499), ("x-slo-tpot-ms", 50, 49.9)):
        assert world.post(key, **{header: str(fine)}).status_code == 200
        error = error_of(world.post(key, **{header: str(tight)}), 403, "slo_not_allowed")
        assert error["param"] == header
        assert world.post(key, **{header: "nonsense"}).status_code == 400
    assert world.post(world.keys.texts["first"], {**COMPLETION, "priority": 100}).is_success
    for limit in limits:
        assert world.metric("key_refused_total", key="modest", limit=limit) == 1
    assert world.running("modest") == 0


# ---- usage --------------------------------------------------------------------------------------


def test_usage_is_what_answers_said(world: World) -> None:
    key = world.add("billed", tenant="team")
    world.served.says(TOKENS, cached_tokens=2)
    sums = {"prompt_tokens": 0, "completion_tokens": 0, "cached": 0}
    for body in (
        COMPLETION,
        {**COMPLETION, "n": 3},
        {**COMPLETION, "prompt": ["hello", "hello you"], "n": 2},
        {**COMPLETION, "model": PIECE},
    ):
        usage = world.post(key, body).json()["usage"]
        sums["prompt_tokens"] += usage["prompt_tokens"]
        sums["completion_tokens"] += usage["completion_tokens"]
        sums["cached"] += usage["prompt_tokens_details"]["cached_tokens"]
    expected = {
        "requests": 4, "prompt_tokens": sums["prompt_tokens"], "cached_tokens": sums["cached"],
        "output_tokens": sums["completion_tokens"],
    }  # fmt: skip
    assert world.used("billed") == expected
    for name, value in expected.items():
        assert world.metric(f"key_{name}_total", key="billed") == value
    report = world.get("/admin/usage").json()
    rows = [(row["key"], row["tenant"], row["model"]) for row in report["usage"]]
    assert [row for row in rows if row[0] == "billed"] == [
        ("billed", "team", BYTE), ("billed", "team", PIECE),
    ]  # fmt: skip
    csv = world.get("/admin/usage?format=csv")
    assert csv.headers["content-type"].startswith("text/csv")
    assert csv.text.splitlines()[0].startswith("key,tenant,model,requests,prompt_tokens")
    assert len(csv.text.splitlines()) == 1 + len(rows)
    assert world.get("/admin/usage?format=xml").status_code == 400


def test_every_served_request_is_a_line(world: World) -> None:
    key = world.add("lined")
    answer = world.post(key, {**COMPLETION, "n": 2}, **{"x-request-id": "mine-1"})
    assert world.post(key, {**COMPLETION, "n": 0}).status_code == 400
    wait_until(lambda: b"lined" in world.log.read_bytes())
    (line,) = [json.loads(text) for text in world.log.read_text().splitlines() if "lined" in text]
    usage = answer.json()["usage"]
    assert line.pop("time")
    assert line == {
        "request_id": "mine-1", "key": "lined", "tenant": "lined", "model": BYTE, "choices": 2,
        "prompt_tokens": usage["prompt_tokens"], "cached_tokens": 0,
        "output_tokens": usage["completion_tokens"], "finish": {"length": 2},
    }  # fmt: skip


def test_an_answer_that_is_cut_counts_as_far_as_it_got(world: World) -> None:
    key = world.add("cut")
    world.served.says(TOKENS, forever=True, delay_s=0.01)
    stream = world.client(key).completions.create(stream=True, **{**COMPLETION, "max_tokens": 200})
    for _ in range(4):
        next(iter(stream))
    stream.close()
    wait_until(lambda: world.used("cut")["requests"] == 1)
    assert 4 <= world.used("cut")["output_tokens"] < 100


# ---- reloading ----------------------------------------------------------------------------------


def test_a_revoked_key_ends_with_its_requests_under_way(world: World) -> None:
    key = world.add("leaver")
    world.served.says([50] * 60, delay_s=0.01)
    body = {**COMPLETION, "max_tokens": 60}
    stream = world.client(key).completions.create(stream=True, **body)
    next(iter(stream))
    world.keys.revoke("leaver")
    assert world.post(key, body={**body, "max_tokens": 1}).status_code == 200, "not read yet"
    assert world.reload().json() == {"keys": 2}
    with pytest.raises(openai.AuthenticationError, match="'leaver' is revoked"):
        world.client(key).completions.create(**body)
    rest = list(stream)
    assert rest[-1].choices[0].finish_reason == "length", "what was under way is answered"
    assert world.post(world.keys.texts["first"], {**body, "max_tokens": 1}).status_code == 200
    listed = {one["name"]: one["state"] for one in world.get("/admin/keys").json()["keys"]}
    assert listed == {"first": "active", "leaver": "revoked"}


def test_a_broken_file_keeps_the_old_keys_and_says_so(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    key, before = world.keys.texts["first"], world.keys.path.read_bytes()
    failed = world.metric("keys_reloads_total", result="failed")
    for breakage, says in (
        (lambda: world.keys.path.write_text("{"), "not JSON"),
        (lambda: world.keys.path.chmod(0o644), "chmod 600"),
        (world.keys.path.unlink, "No such file"),
    ):
        breakage()
        answer = world.reload()
        assert answer.status_code == 400
        assert says in answer.json()["error"]["message"]
        assert "stay in force" in answer.json()["error"]["message"]
        assert says in world.get("/admin/keys").json()["error"]
        assert world.post(key).status_code == 200
        assert world.metric("keys_file_broken") == 1
    assert world.metric("keys_reloads_total", result="failed") == failed + 3
    errors = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert sum("stay in force" in record.getMessage() for record in errors) == 3
    world.keys.path.write_bytes(before)
    world.keys.path.chmod(0o600)
    assert world.reload().status_code == 200
    assert world.metric("keys_file_broken") == 0
    assert world.get("/admin/keys").json()["error"] is None


def test_reloads_beside_each_other_and_requests(world: World) -> None:
    key, answers = world.keys.texts["first"], list[int]()

    def ask() -> None:
        with httpx.Client(base_url=world.served.url, timeout=60) as http:
            for _ in range(10):
                answer = http.post(
                    "/v1/completions", json=COMPLETION, headers={"authorization": f"Bearer {key}"}
                )
                answers.append(answer.status_code)
                answers.append(http.post("/admin/keys/reload").status_code)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for number in range(10):
        world.keys.add(f"more-{number}")
    for thread in threads:
        thread.join()
    assert answers == [200] * 80
    assert world.reload().json() == {"keys": 11}


def test_without_a_keys_file_there_is_nothing_to_reload(served: Served) -> None:
    assert served.http.post("/admin/keys/reload").status_code == 409
    assert served.http.get("/admin/keys").json()["keys"] == []
    served.says(TOKENS)
    answer = served.http.post("/v1/completions", json=COMPLETION)
    assert answer.status_code == 200
    assert not [name for name in answer.headers if name.startswith("x-ratelimit")]
    (row,) = served.http.get("/admin/usage").json()["usage"]
    assert (row["key"], row["tenant"], row["requests"]) == ("", "", 1)


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0, "0s"), (0.0171, "18ms"), (0.9999, "1s"), (8.64, "8.64s"), (360, "6m0s"),
        (3630.5, "1h0m30.5s"),
    ],
)  # fmt: skip
def test_durations_are_openais(seconds: float, shown: str) -> None:
    assert show_duration(seconds) == shown
