"""Models, keys, health, logs and metrics."""

import json
import logging
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import openai
import pytest
from fake_gateway import TIMING
from prometheus_client.parser import text_string_to_metric_families
from served import BYTE, PIECE, Served, make_gateway
from small_tokenizers import EOS
from starlette.routing import Route
from tokenizers import Tokenizer

from c2cserve.runtime.gateway import Refused
from c2cserve.server.app import create_app
from c2cserve.server.settings import ServerSettings

COMPLETION = {"model": BYTE, "prompt": "hello", "max_tokens": 3}


@pytest.fixture(scope="module")
def locked(byte_dir: Path, piece_dir: Path) -> Iterator[Served]:
    settings = ServerSettings(api_keys=("key-1", "key-2"), admin_key="root")
    with Served(make_gateway(byte_dir, piece_dir), settings) as served:
        yield served


# ---- models -------------------------------------------------------------------------------------


def test_models(served: Served) -> None:
    models = {model.id: model for model in served.client.models.list()}
    assert set(models) == {BYTE, PIECE}
    assert models[BYTE].object == "model"
    assert models[BYTE].created == 1_700_000_000
    assert models[BYTE].owned_by
    assert served.client.models.retrieve(BYTE).id == BYTE, "an id may contain a slash"
    assert served.client.models.retrieve("nick").id == BYTE
    assert served.http.get("/v1/models/org%2Fbyte").json()["id"] == BYTE
    with pytest.raises(openai.NotFoundError):
        served.client.models.retrieve("org/none")


def test_admin_models(served: Served) -> None:
    listed = served.http.get("/admin/models").json()["models"]
    assert {model["id"]: model["state"] for model in listed} == {BYTE: "ready", PIECE: "ready"}
    entry = {"id": "org/new", "path": "/somewhere", "pinned": True}
    added = served.http.post("/admin/models", json=entry)
    assert added.status_code == 201
    assert added.json()["id"] == "org/new"
    assert served.http.get("/admin/models/org/new").json()["max_context"] == 256
    assert served.http.post("/admin/models/org/new/reload").json()["id"] == "org/new"
    assert served.http.delete("/admin/models/org/new").status_code == 200
    assert served.http.delete("/admin/models/org/new").status_code == 404
    calls = [("add", entry), ("reload", "org/new"), ("remove", "org/new")]
    assert served.gateway.admin_calls == calls
    for body in (b"", b"{", b"[]", b"5"):
        assert served.http.post("/admin/models", content=body).status_code == 400


def test_admin_refusals(served: Served) -> None:
    served.gateway.admin_refusal = Refused(409, "the id is taken")
    answer = served.http.post("/admin/models", json={"id": BYTE})
    assert answer.status_code == 409
    assert answer.json()["error"]["message"] == "the id is taken"


def test_state(served: Served) -> None:
    state = served.http.get("/admin/state").json()
    assert state["slices"][0]["id"] == "cpu0"
    assert state["slices"][0]["switches"] == 7
    assert {model["id"] for model in state["models"]} == {BYTE, PIECE}
    assert state["counters"]["rejected_429"] == 5


# ---- keys ---------------------------------------------------------------------------------------


def status(served: Served, method: str, path: str, key: str | None) -> int:
    headers = {} if key is None else {"authorization": f"Bearer {key}".encode()}
    body = COMPLETION if method == "POST" else None
    return served.http.request(method, path, headers=headers, json=body).status_code


@pytest.mark.parametrize(
    ("method", "path", "right"),
    [
        ("POST", "/v1/completions", "key-2"),
        ("GET", "/v1/models", "key-1"),
        ("GET", "/v1/models/org/byte", "key-1"),
        ("GET", "/admin/state", "root"),
        ("GET", "/admin/models", "root"),
        ("GET", "/metrics", "root"),
    ],
)
def test_keys(locked: Served, method: str, path: str, right: str) -> None:
    wrong = "key-1" if right == "root" else "root"
    for key in (None, "key", right + "x", wrong, "ключ"):
        assert status(locked, method, path, key) == 401
    assert status(locked, method, path, right) == 200


OPEN = {"/", "/api/version", "/docs", "/health", "/openapi.json", "/ready", "/version"}


def test_every_other_route_needs_a_key(locked: Served) -> None:
    """The routes are the application's own, so that a new one is asked for its key here."""
    settings = ServerSettings(api_keys=("key-1",), admin_key="root")
    opened: set[str] = set()
    for route in create_app(locked.gateway, settings).routes:
        assert isinstance(route, Route)
        path = re.sub(r"\{[^}]*\}", "x", route.path)
        for method in route.methods or ():
            answer = status(locked, method, path, None)
            if answer != 401:
                opened.add(route.path)
    assert {one for one in opened if not one.startswith("/docs/")} == OPEN


@pytest.mark.parametrize(
    ("headers", "says"),
    [
        ({}, "You did not provide an admin key"),
        ({"authorization": "Bearer key-1"}, "Incorrect admin key provided"),
    ],
)
def test_a_missing_admin_key_is_no_wrong_api_key(
    locked: Served, headers: dict[str, str], says: str
) -> None:
    answer = locked.http.get(f"{locked.url}/admin/models", headers=headers)
    assert (answer.status_code, answer.json()["error"]["message"]) == (401, says)


def test_health_needs_no_key(locked: Served) -> None:
    for path in ("/health", "/ready", "/version"):
        assert status(locked, "GET", path, None) == 200


def test_the_client_sees_authentication_errors(locked: Served) -> None:
    with pytest.raises(openai.AuthenticationError) as caught:
        locked.client.models.list()
    assert caught.value.code == "invalid_api_key"
    client = openai.OpenAI(base_url=f"{locked.url}/v1", api_key="key-2")
    assert client.models.list().data
    client.close()


# ---- health -------------------------------------------------------------------------------------


def test_health_and_readiness(served: Served) -> None:
    for health, ready in ((True, True), (True, False), (False, False)):
        served.gateway.healthy, served.gateway.ready = health, ready
        assert served.http.get("/health").status_code == (200 if health else 503)
        assert served.http.get("/ready").status_code == (200 if ready else 503)
    assert "version" in served.http.get("/version").json()


# ---- logs ---------------------------------------------------------------------------------------


def test_one_line_per_request(
    served: Served, byte: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    tokens = byte.encode("one two").ids[1:]
    served.says([*tokens, EOS], cached_tokens=2)
    with caplog.at_level(logging.INFO, "c2cserve.server"):
        answer = served.http.post(
            "/v1/completions",
            json={**COMPLETION, "max_tokens": 50},
            headers={"x-request-id": "mine-7"},
        )
    assert answer.headers["x-request-id"] == "mine-7"
    (line,) = [vars(record) for record in caplog.records if "output_tokens" in vars(record)]
    assert line["request_id"] == "mine-7"
    assert line["model"] == BYTE
    assert line["prompt_tokens"] == served.job.request.prompt_len
    assert (line["cached_tokens"], line["output_tokens"]) == (2, len(tokens) + 1)
    assert line["finish"] == "stop"
    assert (line["slice"], line["switched"]) == (TIMING.slice, True)
    assert 0 < line["ttft_ms"] <= line["total_ms"]
    first, second = (served.http.get("/health").headers["x-request-id"] for _ in range(2))
    assert first != second


# ---- metrics ------------------------------------------------------------------------------------


def samples(served: Served) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    answer = served.http.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }


def test_metrics_of_requests(served: Served, byte: Tokenizer) -> None:
    tokens = byte.encode("one two three").ids[1:]
    before = samples(served)
    served.says([*tokens, EOS], cached_tokens=1, delay_s=0.01)
    served.client.completions.create(**{**COMPLETION, "max_tokens": 50})
    list(served.client.completions.create(stream=True, **{**COMPLETION, "max_tokens": 2}))
    after = samples(served)

    def grew(name: str, **labels: str) -> float:
        key = (name, tuple(sorted({"model_name": BYTE, **labels}.items())))
        return after[key] - before.get(key, 0.0)

    prompt = served.job.request.prompt_len
    assert grew("vllm:prompt_tokens_total") == 2 * prompt
    assert grew("vllm:generation_tokens_total") == len(tokens) + 3
    assert grew("vllm:request_success_total", finished_reason="stop") == 1
    assert grew("vllm:request_success_total", finished_reason="length") == 1
    assert grew("vllm:prefix_cache_queries_total") == 2 * prompt
    assert grew("vllm:prefix_cache_hits_total") == 2
    for name in (
        "vllm:time_to_first_token_seconds",
        "vllm:e2e_request_latency_seconds",
        "vllm:request_queue_time_seconds",
        "vllm:request_prefill_time_seconds",
        "vllm:request_prompt_tokens",
        "vllm:request_generation_tokens",
        "c2cserve:switch_seconds",
        "c2cserve:weight_wait_seconds",
    ):
        assert grew(f"{name}_count") == 2, name
    assert grew("c2cserve:switch_seconds_sum") == pytest.approx(2 * TIMING.switch_s)
    assert grew("vllm:request_queue_time_seconds_sum") == pytest.approx(2 * TIMING.queue_s)
    assert 0.02 <= grew("vllm:time_to_first_token_seconds_sum") < 1
    assert grew("c2cserve:slo_total", met="true") == 2


def test_removed_models_leave_nothing_in_metrics(served: Served) -> None:
    """A thousand come, show their series, and go. The others' counters stay."""
    served.client.completions.create(**COMPLETION)
    before, files = samples(served), served.gateway.files
    for batch in range(20):
        names = [f"passing/{batch}.{number}" for number in range(50)]
        files.update({name: replace(files[BYTE], id=name) for name in names})
        served.client.completions.create(**{**COMPLETION, "model": names[0]})
        meanwhile = {dict(labels).get("model_name") for _, labels in samples(served)}
        assert meanwhile >= set(names)
        for name in names:
            del files[name]
    after = samples(served)
    assert after.keys() - before.keys() == set()
    models = {key: value for key, value in before.items() if "model_name" in dict(key[1])}
    timeless = {key: value for key, value in models.items() if not key[0].endswith("_created")}
    assert {key: after[key] for key in timeless} == timeless


def test_a_request_that_outlives_its_model_leaves_no_series(served: Served) -> None:
    files = served.gateway.files
    files["leaving"] = replace(files[BYTE], id="leaving")
    stream = served.client.completions.create(**{**COMPLETION, "model": "leaving"}, stream=True)
    next(stream)
    del files["leaving"]
    list(stream)
    assert not [labels for _, labels in samples(served) if ("model_name", "leaving") in labels]


def test_metrics_of_the_snapshot(served: Served) -> None:
    values = samples(served)

    def value(name: str, **labels: str) -> float:
        return values[(name, tuple(sorted(labels.items())))]

    assert value("vllm:num_requests_running", model_name=BYTE) == 2
    assert value("vllm:num_requests_waiting", model_name=BYTE) == 3
    assert value("vllm:kv_cache_usage_perc", slice="cpu0") == 0.25
    assert value("vllm:num_preemptions_total", slice="cpu0") == 4
    assert value("c2cserve:slice_switches_total", slice="cpu0") == 7
    assert value("c2cserve:slice_output_tokens_total", slice="cpu0") == 600
    assert value("c2cserve:slice_flash_steps_total", slice="cpu0") == 31
    assert value("c2cserve:slice_flash_missed_steps_total", slice="cpu0") == 37
    assert value("c2cserve:pool_used_bytes") == 3000
    assert value("c2cserve:pool_budget_bytes") == 9000
    assert value("c2cserve:rejected_429_total") == 5
    assert value("c2cserve:model_state", model_name=BYTE, state="ready") == 1
    assert value("c2cserve:model_state", model_name=BYTE, state="cold") == 0


def test_errors_are_counted_by_route(served: Served) -> None:
    def count() -> float:
        key = ("c2cserve:http_responses_total", (("route", "/v1/completions"), ("status", "400")))
        return samples(served).get(key, 0.0)

    before = count()
    served.http.post("/v1/completions", content=json.dumps({**COMPLETION, "n": 0}))
    assert count() == before + 1


def test_metrics_of_slices_have_the_names_that_dashboards_ask_for(served: Served) -> None:
    """The file lists name, type and help text of each family: dashboards and alerts rely on it."""
    families = text_string_to_metric_families(served.http.get("/metrics").text)
    shown = {(one.name, one.type, one.documentation) for one in families}
    expected = Path(__file__).with_name("slice_metric_families.tsv").read_text().splitlines()
    of_slices = {one for one in shown if one[0].startswith("c2cserve:slice_")}
    assert of_slices <= {tuple(line.split("\t")) for line in expected} <= shown
