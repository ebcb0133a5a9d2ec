"""Seeded mutations of good requests: wrong numbers, wrong types, fields too few and too many."""

import json
import random
from typing import Any

NUMBERS = [
    "0", "-0", "-0.0", "1", "-1", "0.5", "1.0", "1e-300", "5e-324", "1e308", "1e400", "-1e400",
    "NaN", "Infinity", "-Infinity", "2147483647", "2147483648", "4294967296",
    "9223372036854775807", "9223372036854775808", "18446744073709551615", "18446744073709551616",
    "36893488147419103232", "-9223372036854775809", "1e19", "1" + "0" * 5000,
    "0." + "0" * 400 + "1",
    "00", "0x10", "1_000", "+1",
]  # fmt: skip
TEXTS = [
    '""', '"a"', '"\\u0000"', '"\\ud800"', '"\\udc00\\ud800"', '"\ufeff"', '"é👩‍👩‍👧"', '"\u202e"',
    '"auto"', '"text"', '"5"', '"' + "9" * 5000 + '"', '"\\ud83d\\ude00"', '"\x7f"', '"<|eos|>"',
    '"{{ 1 }}"', '"../../etc/passwd"', '"\n"', '"\t"', '"' + "x" * 3000 + '"',
]  # fmt: skip
OTHERS = [
    "null", "true", "false", "[]", "{}", "[null]", "[[]]", '[""]', '{"": 0}', '{"a": {"a": []}}',
    '["a", 1]', "[1, 2]", "[[1], [2]]", "[" * 300 + "]" * 300, "[" * 10_000, '{"1": 1e-300}',
    '{"' + "1" * 5000 + '": 1}', '{"0": 100, "0": -100}', '[{"role": "user"}]', "", "nul",
]  # fmt: skip

COMPLETION: dict[str, Any] = {
    "model": "sorter-llama", "prompt": "sort: dcba", "max_tokens": 2, "temperature": 0, "top_p": 1,
    "top_k": 0, "min_p": 0, "seed": 1, "n": 1, "stop": "x", "presence_penalty": 0,
    "frequency_penalty": 0, "repetition_penalty": 1, "logit_bias": {"70": 1}, "logprobs": 1,
    "echo": False, "min_tokens": 0, "stop_token_ids": [9], "ignore_eos": False, "priority": 0,
    "stream": False, "best_of": 1, "user": "u",
    "cache_salt": "s",
}  # fmt: skip
CHAT: dict[str, Any] = {
    **{k: v for k, v in COMPLETION.items() if k not in ("prompt", "echo", "best_of", "logprobs")},
    "messages": [{"role": "user", "content": "hello", "name": "a"}], "logprobs": True,
    "top_logprobs": 1, "max_completion_tokens": 2, "chat_template_kwargs": {"a": 1},
    "metadata": {"a": "b"}, "response_format": {"type": "text"}, "store": False,
    "tool_choice": "none", "parallel_tool_calls": True, "separate_reasoning": True,
    "reasoning_effort": "low", "service_tier": "auto",
}  # fmt: skip
TOKENIZE: dict[str, Any] = {
    "model": "sorter-llama", "prompt": "sort: dcba", "add_special_tokens": True,
    "return_token_strs": True,
}  # fmt: skip
DETOKENIZE: dict[str, Any] = {"model": "sorter-llama", "tokens": [70, 71]}
ENTRY: dict[str, Any] = {
    "id": "fuzz", "path": "/nowhere", "aliases": ["f"], "pinned": False, "priority": 0,
    "ttft_s": 1.0, "tpot_s": 0.1, "max_context": 64, "dtype": "float32", "keep_warm_s": 1.0,
    "hub": "a/b",
}  # fmt: skip
ROUTES = [("/v1/completions", COMPLETION)] * 5 + [("/v1/chat/completions", CHAT)] * 5 + [
    ("/tokenize", TOKENIZE), ("/detokenize", DETOKENIZE), ("/admin/models", ENTRY),
]  # fmt: skip
PATHS = [
    "/", "/health", "/ready", "/version", "/metrics", "/v1/models", "/v1/models/none",
    "/admin/state",
    "/admin/models", "/admin/models/none", "/admin/models/none/reload", "/v1/completions", "/v1/",
    "/%00", "/v1/models/%ff%fe", "/v1/models/%ed%a0%80", "/v1/models/" + "a" * 4000, "//", "/..",
    "/health/", "/openapi.json", "/v1/models/a%2fb?x=%00",
]  # fmt: skip
METHODS = ["GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"]
HEADERS = [
    "x-slo-ttft-ms: NaN", "x-slo-ttft-ms: 1e400", "x-slo-tpot-ms: -1", "x-request-id: \xe9",
    "x-request-id: " + "a" * 500, "authorization: Bearer \xff", "content-type: text/plain",
    "content-encoding: gzip", "expect: 100-continue", "upgrade: websocket\r\nconnection: upgrade",
    "x-slo-ttft-ms: 1_0", "accept: \x80", "connection: close", "host: evil.example",
    "origin: null", "origin: http://evil.example", "origin: http://localhost", "forwarded: for=1",
]  # fmt: skip


class Mutations:
    """An endless supply, the same for the same seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def request(self) -> bytes:
        pick = self._random
        if pick.random() < 0.1:
            return self._bytes(pick.choice(METHODS), pick.choice(PATHS), self._value().encode())
        path, good = pick.choice(ROUTES)
        body = self._body(good)
        if pick.random() < 0.05:
            at = pick.randrange(len(body) + 1)
            junk = pick.choice(
                [b"\xff", b"\x00", b"\xed\xa0\x80", b"", b"}", b'"', b"\xef\xbb\xbf"]
            )
            body = body[:at] + junk + body[at + pick.randrange(3) :]
        return self._bytes("POST", path, body)

    def wrong_field(self) -> tuple[str, str, str]:
        """A path, a field of its good request, and the body with that field alone mutated."""
        path, good = self._random.choice(ROUTES[:-1])
        field = self._random.choice([*good, "unknown", "tools", "chat_template"])
        value = self._nested(field) if self._random.random() < 0.3 else self._value()
        fields = {key: json.dumps(one) for key, one in good.items()} | {field: value}
        text = ", ".join(f'"{key}": {one}' for key, one in fields.items())
        return path, field, f"{{{text}}}"

    def _value(self) -> str:
        kind = self._random.random()
        return self._random.choice(NUMBERS if kind < 0.5 else TEXTS if kind < 0.7 else OTHERS)

    def _body(self, good: dict[str, Any]) -> bytes:
        """Fields as written JSON, so that they may occur twice and be no JSON at all."""
        pick = self._random
        fields = [(key, json.dumps(value)) for key, value in good.items() if pick.random() < 0.7]
        for _ in range(pick.choice([1, 1, 1, 2, 3])):
            key = pick.choice([*good, "unknown", "tools", "\\u0000"])
            value = self._nested(key) if pick.random() < 0.2 else self._value()
            # Where the good one stands, or beside it.
            if pick.random() < 0.7:
                fields = [one for one in fields if one[0] != key]
            fields.insert(pick.randrange(len(fields) + 1), (key, value))
        text = "{" + ", ".join(f'"{key}": {value}' for key, value in fields) + "}"
        return text.encode("utf-8", "surrogatepass")

    def _nested(self, key: str) -> str:
        value = self._value()
        if key == "messages":
            role = self._random.choice(['"user"', '"tool"', value])
            return f'[{{"role": {role}, "content": {value}}}]'
        if key == "logit_bias":
            return f'{{"{self._random.randrange(400)}": {value}}}'
        return self._random.choice([f"[{value}]", f"[{value}, {value}]", f'{{"a": {value}}}'])

    def _bytes(self, method: str, path: str, body: bytes) -> bytes:
        lines = [f"{method} {path} HTTP/1.1", "host: localhost", f"content-length: {len(body)}"]
        lines.append("content-type: application/json")
        if self._random.random() < 0.05:
            lines.append(self._random.choice(HEADERS))
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1") + body
