"""What is shown, counted and scored agree with each other."""

import pytest
from fake_gateway import Play
from served import BYTE, Served
from small_tokenizers import EOS
from tokenizers import Tokenizer

from c2cserve.runtime.gateway import Refused


@pytest.mark.parametrize("echo", [False, True])
def test_text_offsets(served: Served, byte: Tokenizer, echo: bool) -> None:
    prompt, text = "é the answer is", " 你👋🏽 42."
    served.says([*byte.encode(text, add_special_tokens=False).ids, EOS])
    answer = served.client.completions.create(
        model=BYTE, prompt=prompt, max_tokens=99, logprobs=1, echo=echo
    )
    (choice,) = answer.choices
    whole = prompt + text if echo else text
    assert choice.text == whole
    logprobs = choice.logprobs
    assert logprobs is not None
    assert logprobs.text_offset is not None
    assert logprobs.tokens is not None
    offsets = logprobs.text_offset
    assert offsets == sorted(offsets)
    assert offsets[-2] < offsets[-1] == len(whole), "the end token adds no text"
    for offset, token in zip(offsets[:-1], logprobs.tokens[:-1], strict=True):
        if "\N{REPLACEMENT CHARACTER}" not in token and token != "<|bos|>":
            assert whole[offset:].startswith(token)


@pytest.mark.parametrize("stream", [False, True])
def test_nothing_beyond_a_stop_string_counts(served: Served, byte: Tokenizer, stream: bool) -> None:
    tokens = byte.encode("XYZQ", add_special_tokens=False).ids
    assert len(tokens) == 4
    served.says(tokens, per_delta=4)
    body = {
        "model": BYTE, "prompt": "x", "max_tokens": 4, "stop": "Y", "logprobs": 0,
        "stream": stream,
    }  # fmt: skip
    if stream:
        chunks = list(
            served.client.completions.create(**body, stream_options={"include_usage": True})
        )
        usage = chunks[-1].usage
        scored = [
            token
            for chunk in chunks if chunk.choices and chunk.choices[0].logprobs
            for token in chunk.choices[0].logprobs.tokens
        ]  # fmt: skip
    else:
        answer = served.client.completions.create(**body)
        usage = answer.usage
        scored = answer.choices[0].logprobs.tokens
    assert usage.completion_tokens == 2
    assert scored == ["X", "Y"]


def test_refused_requests_are_not_latencies(served: Served) -> None:
    def page() -> str:
        lines = served.http.get("/metrics").text.splitlines()
        return "\n".join(line for line in lines if "_created" not in line and "http" not in line)

    before = page()
    served.plays(lambda job: Play(refuse=Refused(429, "full")))
    body = {"model": BYTE, "prompt": "x"}
    assert served.http.post("/v1/completions", json=body).status_code == 429
    assert page() == before


def test_vllm_s_names_of_token_latencies(served: Served) -> None:
    def count(name: str) -> float:
        lines = served.http.get("/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name + "_count"))

    gaps = "vllm:inter_token_latency_seconds"
    requests = "vllm:request_time_per_output_token_seconds"
    before = count(gaps), count(requests)
    served.says([50, 51, 52, 53])
    served.client.completions.create(model=BYTE, prompt="x", max_tokens=4)
    assert (count(gaps), count(requests)) == (before[0] + 3, before[1] + 1)
