"""Every limit of a request: just kept, just broken, and named when it is."""

import json
import logging
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_gateway import model_files
from served import BYTE, Served, make_gateway
from small_tokenizers import byte_level

from c2cserve.server.settings import RequestLimits, ServerSettings, TextSettings
from c2cserve.server.text.templates import ChatTemplate
from c2cserve.server.text.tokenizer import Tokenizer
from c2cserve.server.text.vocabulary import TokenizerError
from c2cserve.serving.logs import JsonFormatter, TextFormatter

LIMITS = RequestLimits(
    choices=4, messages=3, stops=2, logit_bias=3, prompt_chars=400, prompt_tokens=60
)
BODY_BYTES = 4000


@pytest.fixture(scope="module")
def strict(byte_dir: Path, piece_dir: Path) -> Iterator[Served]:
    settings = ServerSettings(
        body_bytes_max=BODY_BYTES, requests=LIMITS, text=TextSettings(timeout_s=1.0)
    )
    with Served(make_gateway(byte_dir, piece_dir), settings) as served:
        yield served


def completion(**fields: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/completions", {"model": BYTE, "prompt": "a", "max_tokens": 1, **fields}


def chat(*contents: str, **fields: Any) -> tuple[str, dict[str, Any]]:
    messages = [{"role": "user", "content": content} for content in contents]
    return "/v1/chat/completions", {"model": BYTE, "messages": messages, "max_tokens": 1, **fields}


CASES = [
    ("n", 4, completion(prompt=["a", "b"], n=2), completion(prompt=["a", "b", "c"], n=2)),
    ("messages", 3, chat("a", "b", "c"), chat("a", "b", "c", "d")),
    ("stop", 2, completion(stop=["x", "y"]), completion(stop=["x", "y", "z"])),
    (
        "logit_bias", 3, completion(logit_bias={"1": 1, "2": 1, "3": 1}),
        completion(logit_bias={"1": 1, "2": 1, "3": 1, "4": 1}),
    ),
    (
        "stop_token_ids", 3, completion(stop_token_ids=[1, 2, 3]),
        completion(stop_token_ids=[1, 2, 3, 4]),
    ),
    (
        "prompt", 400, completion(prompt=["the quick brown fox"] * 2),
        completion(prompt=["ab" * 100] * 2 + ["c"]),
    ),
    ("messages", 400, chat("the quick brown fox"), chat("ab" * 100, "ab" * 100, "c")),
    ("prompt", 60, completion(prompt=[[5] * 30] * 2), completion(prompt=[5] * 31, n=2)),
]  # fmt: skip


@pytest.mark.parametrize(("param", "limit", "kept", "broken"), CASES)
def test_limits(strict: Served, param: str, limit: int, kept: Any, broken: Any) -> None:
    answer = strict.http.post(kept[0], json=kept[1])
    assert answer.status_code == 200, answer.text
    answer = strict.http.post(broken[0], json=broken[1])
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["param"], error["code"]) == (param, "limit_exceeded")
    assert str(limit) in error["message"]
    assert "--max-" in error["message"]


def test_a_body_is_refused_before_it_is_sent(strict: Served) -> None:
    from http.client import HTTPConnection

    connection = HTTPConnection("127.0.0.1", strict.port, timeout=5)
    connection.putrequest("POST", "/v1/completions")
    connection.putheader("content-type", "application/json")
    connection.putheader("content-length", str(BODY_BYTES + 1))
    connection.endheaders()
    answer = connection.getresponse()
    assert answer.status == 413
    assert str(BODY_BYTES) in json.loads(answer.read())["error"]["message"]
    connection.close()


def test_a_text_that_can_not_fit_is_not_read(byte_dir: Path, piece_dir: Path) -> None:
    byte, piece = Tokenizer(byte_dir), Tokenizer(piece_dir)
    for tokenizer in (byte, piece):
        longest = tokenizer.token_bytes_max
        assert longest is not None
        for text in ("hello world", "<|im_start|>" * 9, "é👋🏽 \n" * 20, " " * 200):
            size, tokens = len(text.encode()), tokenizer.encode(text, special=False)
            assert size <= longest * len(tokens)


def test_a_prompt_is_never_cut_in_silence(tmp_path: Path) -> None:
    """A file may say so, and may say it wrongly: the library panics then."""
    byte_level(tmp_path)
    path = tmp_path / "tokenizer.json"
    fields = json.loads(path.read_text())
    fields["truncation"] = {
        "direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 8,
    }  # fmt: skip
    path.write_text(json.dumps(fields))
    assert len(Tokenizer(tmp_path).encode("a b c d e f g h i j k l")) > 8


class Panics:
    """Raise as the library does: its error is no Exception."""

    class PanicException(BaseException):
        pass

    def encode_batch_fast(self, *_: object, **__: object) -> None:
        raise self.PanicException("index out of bounds")


def test_a_panic_of_the_tokenizer_is_an_error_like_any_other(byte_dir: Path) -> None:
    tokenizer = Tokenizer(byte_dir)
    tokenizer._fast = Panics()
    with pytest.raises(TokenizerError, match="index out of bounds"):
        tokenizer.encode("a")


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("a\n{{ messages.nothing.more }}", "(line 2)"),
        ("a\nb\n{{ 1 // 0 }}", "(line 3): ZeroDivisionError"),
        ("\n{{ raise_exception('only one\nmessage') }}", "(line 2)"),
        ("{{ 'x' * 100 }}" * 5, "400 characters"),
        ("{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}", "RecursionError"),
    ],
)
def test_template_errors_say_where(tmp_path: Path, template: str, says: str) -> None:
    (tmp_path / "chat_template.jinja").write_text(template)
    with pytest.raises(TokenizerError) as caught:
        ChatTemplate(tmp_path).render([{"role": "user", "content": "x"}], {}, 400)
    assert says in str(caught.value)


def test_a_template_without_end(strict: Served, tmp_path: Path) -> None:
    byte_level(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    )
    strict.gateway.files["endless"] = model_files("endless", tmp_path, vocab=400)
    path, body = chat("x", model="endless")
    answer = strict.http.post(path, json=body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["param"], error["code"]) == ("messages", "limit_exceeded")
    assert "--text-timeout" in error["message"]
    assert strict.http.post(*completion()[:1], json=completion()[1]).status_code == 200


NUMBERS = [
    "1e-300", "5e-324", "18446744073709551616", "1" + "0" * 30, "-1", "-0.0", "NaN", "Infinity",
    "1e400", '"1"', "2.5",
]  # fmt: skip
FIELDS = [
    "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "seed", "n", "max_tokens", "min_tokens", "logprobs", "priority",
    "best_of",
]  # fmt: skip


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("number", NUMBERS)
def test_numbers_are_refused_or_within_what_an_engine_holds(
    served: Served, field: str, number: str
) -> None:
    body = f'{{"model": "{BYTE}", "prompt": "a", "max_tokens": 1, "{field}": {number}}}'
    answer = served.http.post("/v1/completions", content=body)
    assert answer.status_code in (200, 400), answer.text
    if answer.status_code == 400:
        error = answer.json()["error"]
        assert field in f"{error['param']} {error['message']}" or error["code"]
        return
    sampling = served.job.sampling
    struct.pack("<i", sampling.top_k)
    for value in (sampling.top_p, sampling.repetition_penalty):
        (single,) = struct.unpack("<f", struct.pack("<f", value))
        assert single > 0
    assert sampling.temperature == 0 or sampling.temperature >= 1e-5


def test_a_key_of_thousands_of_digits(served: Served) -> None:
    path, body = completion(logit_bias={"1" * 5000: 1})
    answer = served.http.post(path, json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].startswith("logit_bias")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/admin/models"])
def test_deep_json(served: Served, path: str) -> None:
    for body in (b"[" * 10_000, b"[" * 10_000 + b"]" * 10_000, b'{"a":' * 10_000):
        assert served.http.post(path, content=body).status_code == 400


@pytest.mark.parametrize(
    ("method", "path", "status"), [("GET", "/none", 404), ("PATCH", "/v1/models", 405)]
)
def test_the_router_s_own_answers(served: Served, method: str, path: str, status: int) -> None:
    answer = served.http.request(method, path, headers={"x-request-id": "mine"})
    assert answer.status_code == status
    assert answer.headers["x-request-id"] == "mine"
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    for bad in ("a" * 200, "a b", "\xe9"):
        answer = served.http.request(method, path, headers={"x-request-id": bad.encode("latin-1")})
        assert answer.headers["x-request-id"] != bad


def test_why_is_in_the_log(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    path, body = completion(temperature=9)
    with caplog.at_level(logging.INFO, "c2cserve.server"):
        served.http.post(path, json=body, headers={"x-request-id": "mine-8"})
        served.http.post(path, json={**body, "model": "no\nne"})
    (refused, unknown) = [one for one in caplog.records if "status" in vars(one)]
    line = TextFormatter("%(message)s").format(refused)
    for part in ("400", "less than or equal to 2", "request_id=mine-8", f"model={BYTE}"):
        assert part in line
    assert "param=temperature" in line
    fields = json.loads(JsonFormatter("server").format(refused))
    assert (fields["param"], fields["model"]) == ("temperature", BYTE)
    assert "less than or equal to 2" in fields["message"]
    assert "\n" not in TextFormatter("%(message)s").format(unknown), "one line per event"


def test_why_a_model_failed_is_in_the_log(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    served.says([50, 51, 52], fail_after=2)
    path, body = completion(max_tokens=9, stream=True)
    with caplog.at_level(logging.INFO, "c2cserve.server"):
        assert "the weights are gone" in served.http.post(path, json=body).text
    (failed,) = [one for one in caplog.records if "finish" in vars(one)]
    assert failed.levelno == logging.WARNING
    assert "the weights are gone" in failed.getMessage()


def test_counters_are_there_from_the_start(byte_dir: Path, piece_dir: Path) -> None:
    with Served(make_gateway(byte_dir, piece_dir), ServerSettings()) as fresh:
        text = fresh.http.get("/metrics").text
    for name in (
        f'vllm:request_success_total{{finished_reason="error",model_name="{BYTE}"}}',
        f'vllm:generation_tokens_total{{model_name="{BYTE}"}}',
        f'c2cserve:slo_total{{met="false",model_name="{BYTE}"}}',
        'c2cserve:http_responses_total{route="/v1/completions",status="200"}',
        'c2cserve:http_connections_closed_total{reason="full"}',
        'c2cserve:text_processes_replaced_total{reason="timeout"}',
    ):
        assert f"{name} 0.0" in text
