"""Both inference endpoints as the official client sees them, over a real socket."""

import asyncio
import math
from typing import Any

import openai
import pytest
from fake_gateway import TIMING, Play
from served import BYTE, PIECE, Served
from small_tokenizers import EOS
from tokenizers import Tokenizer

from c2cserve.core.request import BLOCK_TOKENS, Job

HELLO = [{"role": "user", "content": "hello"}]


def ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False).ids


def test_completion(served: Served, byte: Tokenizer) -> None:
    served.says([*ids(byte, " is 42"), EOS], cached_tokens=3)
    answer = served.client.completions.create(model=BYTE, prompt="the answer", max_tokens=50)
    assert answer.id.startswith("cmpl-")
    assert answer.object == "text_completion"
    assert answer.created > 1_700_000_000
    assert answer.system_fingerprint
    (choice,) = answer.choices
    assert (choice.index, choice.text, choice.finish_reason) == (0, " is 42", "stop")
    assert choice.logprobs is None
    usage = answer.usage
    assert usage is not None
    prompt = byte.encode("the answer").ids
    assert usage.prompt_tokens == len(prompt)
    assert usage.completion_tokens == len(ids(byte, " is 42")) + 1
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == 3
    assert served.job.tokens == tuple(prompt)


def test_chat(served: Served, byte: Tokenizer) -> None:
    served.says(ids(byte, "hello world"))
    answer = served.client.chat.completions.create(
        model=BYTE,
        messages=[
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "hello"}]},
            {"role": "assistant", "content": "yes?"},
            {"role": "user", "content": "你好"},
        ],
        max_completion_tokens=len(ids(byte, "hello world")),
    )
    assert answer.id.startswith("chatcmpl-")
    assert answer.object == "chat.completion"
    (choice,) = answer.choices
    assert choice.message.role == "assistant"
    assert choice.message.content == "hello world"
    assert choice.finish_reason == "length"
    assert byte.decode(list(served.job.tokens), skip_special_tokens=False) == (
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n"
        "<|im_start|>assistant\nyes?<|im_end|>\n<|im_start|>user\n你好<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("per_delta", [1, 3])
def test_streams_say_what_whole_answers_say(
    served: Served, byte: Tokenizer, per_delta: int
) -> None:
    text = "你好 👋🏽 the answer is STOPPED."
    served.says([*ids(byte, text), EOS], per_delta=per_delta)
    pieces: list[str] = []
    finishes: list[str | None] = []
    for chunk in served.client.completions.create(
        model=BYTE, prompt="x", max_tokens=200, stream=True, stop=["STOP"]
    ):
        pieces.append(chunk.choices[0].text)
        finishes.append(chunk.choices[0].finish_reason)
        assert chunk.usage is None
    assert "".join(pieces) == text[: text.index("STOP")]
    assert finishes[-1] == "stop"
    assert set(finishes[:-1]) <= {None}
    roles: list[str | None] = []
    chat = ""
    for chunk in served.client.chat.completions.create(
        model=BYTE, messages=HELLO, stream=True, stop="STOP"
    ):
        assert chunk.object == "chat.completion.chunk"
        roles.append(chunk.choices[0].delta.role)
        chat += chunk.choices[0].delta.content or ""
    assert chat == "".join(pieces)
    assert roles[0] == "assistant"
    assert set(roles[1:]) <= {None}


def test_a_stop_string_ends_the_job_at_once(served: Served, byte: Tokenizer) -> None:
    served.says(ids(byte, "one STOP"), forever=True)
    answer = served.client.completions.create(
        model=BYTE, prompt="x", max_tokens=200, stop=["STOP", "never"]
    )
    assert answer.choices[0].text == "one "
    assert answer.choices[0].finish_reason == "stop"
    assert served.gateway.ended == [served.job.request.id]


def test_usage_of_streams(served: Served, byte: Tokenizer) -> None:
    served.says(ids(byte, "hello"), cached_tokens=1)
    chunks = list(
        served.client.completions.create(
            model=BYTE, prompt="x", max_tokens=100, stream=True,
            stream_options={"include_usage": True},
        )
    )  # fmt: skip
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].choices == []
    usage = chunks[-1].usage
    assert usage is not None
    assert usage.completion_tokens == len(ids(byte, "hello"))
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == 1


def test_every_kind_of_prompt(served: Served, byte: Tokenizer) -> None:
    served.says(ids(byte, " world"))
    create = served.client.completions.create
    text = byte.encode("hello").ids
    for prompt, sent in (
        ("hello", [text]),
        (["hello", "the"], [text, byte.encode("the").ids]),
        (text, [text]),
        ([text, [7, 8]], [text, [7, 8]]),
    ):
        served.gateway.jobs.clear()
        answer = create(model=BYTE, prompt=prompt, max_tokens=50)
        assert [list(job.tokens) for job in served.gateway.jobs] == sent
        assert [choice.index for choice in answer.choices] == list(range(len(sent)))
        assert {choice.text for choice in answer.choices} == {" world"}
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == sum(map(len, sent))


def test_n_choices_differ_by_seed_alone(served: Served, byte: Tokenizer) -> None:
    words = ["one", "two", "three"]
    served.plays(lambda job: Play(ids(byte, words[job.sampling.seed - 7]), delay_s=0.002))
    answer = served.client.completions.create(
        model=BYTE, prompt="x", n=3, best_of=3, seed=7, max_tokens=50
    )
    assert [choice.text for choice in answer.choices] == words
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 2, "a prompt counts once"
    texts = ["", "", ""]
    for chunk in served.client.chat.completions.create(
        model=BYTE, messages=HELLO, n=3, seed=7, stream=True
    ):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == words


def test_prompts_times_n_are_numbered_prompt_by_prompt(served: Served, byte: Tokenizer) -> None:
    served.plays(lambda job: Play([job.tokens[-1]]))
    answer = served.client.completions.create(
        model=BYTE, prompt=[[50], [60]], n=2, seed=1, max_tokens=1
    )
    assert [job.tokens for job in served.gateway.jobs] == [(50,), (50,), (60,), (60,)]
    expected = [byte.decode([token]) for token in (50, 50, 60, 60)]
    assert [choice.text for choice in answer.choices] == expected


def test_what_the_job_carries(served: Served, byte: Tokenizer) -> None:
    prompt = "the quick brown fox jumps over the lazy dog " * 3
    served.client.completions.create(
        model="nick", prompt=prompt, max_tokens=9, temperature=0.5, top_p=0.9, seed=11,
        presence_penalty=0.25, frequency_penalty=-0.5, logit_bias={"7": -100, "9": 5},
        user="somebody",
        extra_body={
            "top_k": 4, "min_p": 0.125, "repetition_penalty": 1.5, "min_tokens": 2,
            "stop_token_ids": [77], "priority": 8,
        },
        extra_headers={"x-slo-ttft-ms": "250", "x-slo-tpot-ms": "12.5"},
    )  # fmt: skip
    request, sampling = served.job.request, served.job.sampling
    assert request.model == BYTE, "an alias is resolved"
    assert (request.max_new_tokens, request.priority) == (9, 8)
    assert (request.slo.ttft_s, request.slo.tpot_s) == (0.25, 0.0125)
    assert request.prompt_len == len(served.job.tokens)
    assert len(request.prefix_hashes) == request.prompt_len // BLOCK_TOKENS
    assert (sampling.temperature, sampling.top_p, sampling.seed) == (0.5, 0.9, 11)
    assert (sampling.top_k, sampling.min_p, sampling.repetition_penalty) == (4, 0.125, 1.5)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.25, -0.5)
    assert dict(sampling.logit_bias) == {7: -100, 9: 5}
    assert set(sampling.stop_token_ids) == {EOS, 77}
    assert sampling.min_tokens == 2


def test_defaults(served: Served) -> None:
    served.client.completions.create(model=BYTE, prompt="x")
    first = served.job
    assert first.request.max_new_tokens == 16
    assert (first.request.priority, first.request.slo.ttft_s) == (3, 1.0)
    assert (first.sampling.temperature, first.sampling.top_p, first.sampling.top_k) == (1, 1, 0)
    assert first.sampling.stop_token_ids == (EOS,)
    assert first.sampling.logprobs is None
    served.client.chat.completions.create(model=BYTE, messages=HELLO)
    second = served.job
    assert second.request.max_new_tokens == 256 - second.request.prompt_len
    assert first.sampling.seed != second.sampling.seed, "a seed is drawn for every request"


def test_ignore_eos(served: Served, byte: Tokenizer) -> None:
    served.says([*ids(byte, "one"), EOS, *ids(byte, " two")])
    answer = served.client.completions.create(
        model=BYTE, prompt="x", max_tokens=50, extra_body={"ignore_eos": True}
    )
    assert served.job.sampling.stop_token_ids == ()
    assert answer.choices[0].text == "one two"


def test_fields_that_are_only_stored_or_ask_for_nothing(served: Served, byte: Tokenizer) -> None:
    served.says(ids(byte, "ok"))
    answer = served.client.chat.completions.create(
        model=BYTE, messages=HELLO, user="u", metadata={"a": "b"}, store=False,
        response_format={"type": "text"},
    )  # fmt: skip
    assert answer.choices[0].message.content == "ok"


def test_chat_logprobs(served: Served, byte: Tokenizer) -> None:
    text = " 你👋"
    tokens = ids(byte, text)
    served.says([*tokens, EOS])
    answer = served.client.chat.completions.create(
        model=BYTE, messages=HELLO, logprobs=True, top_logprobs=2
    )
    assert answer.choices[0].logprobs is not None
    content = answer.choices[0].logprobs.content
    assert content is not None
    assert len(content) == len(tokens), "the stop token is not shown"
    assert b"".join(bytes(one.bytes or ()) for one in content) == text.encode()
    for token, one in zip(tokens, content, strict=True):
        assert math.isclose(one.logprob, -token / 1024)
        assert [top.logprob for top in one.top_logprobs] == [-token / 1024, -(token + 1) / 1024]
        assert one.top_logprobs[0].token == one.token
    served.client.chat.completions.create(model=BYTE, messages=HELLO, logprobs=True)
    assert served.job.sampling.logprobs == 0


def test_streamed_logprobs_are_the_whole_answer_s(served: Served, byte: Tokenizer) -> None:
    served.says([*ids(byte, "é 你 hello STOP"), EOS], per_delta=2)
    whole = served.client.completions.create(
        model=BYTE, prompt="x", max_tokens=99, logprobs=1, stop="STOP"
    )
    assert whole.choices[0].logprobs is not None
    collected: dict[str, list[object]] = {}
    for chunk in served.client.completions.create(
        model=BYTE, prompt="x", max_tokens=99, logprobs=1, stop="STOP", stream=True
    ):
        logprobs = chunk.choices[0].logprobs
        if logprobs is not None:
            for name, values in logprobs.model_dump().items():
                collected.setdefault(name, []).extend(values)
    assert collected == whole.choices[0].logprobs.model_dump()


def test_completion_logprobs(served: Served, byte: Tokenizer) -> None:
    tokens = ids(byte, "hello world")
    served.says(tokens)
    answer = served.client.completions.create(
        model=BYTE, prompt="x", max_tokens=len(tokens), logprobs=2
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert "".join(logprobs.tokens) == "hello world"
    assert logprobs.text_offset is not None
    for offset, token in zip(logprobs.text_offset, logprobs.tokens, strict=True):
        assert "hello world"[offset:].startswith(token)
    assert logprobs.token_logprobs == [-token / 1024 for token in tokens]
    assert logprobs.top_logprobs is not None
    assert all(len(top) == 2 for top in logprobs.top_logprobs)


@pytest.mark.parametrize("stream", [False, True])
def test_completion_logprobs_include_the_end_token(
    served: Served, byte: Tokenizer, stream: bool
) -> None:
    """As in vLLM. Evaluations drop the last entry, as that of the one token that they ask for."""
    tokens = [*ids(byte, "hello"), EOS]
    served.says(tokens)
    body: Any = {"model": BYTE, "prompt": "x", "max_tokens": 99, "logprobs": 0}
    answer = served.client.completions.create(stream=stream, **body)
    chunks = answer if stream else [answer]
    found = [chunk.choices[0].logprobs for chunk in chunks if chunk.choices[0].logprobs]
    values = [value for one in found for value in one.token_logprobs]
    assert values == [-token / 1024 for token in tokens]
    assert found[-1].text_offset[-1] == len("hello")


def test_echo_scores_the_prompt(served: Served, byte: Tokenizer) -> None:
    prompt = ids(byte, "the answer is")
    tokens = ids(byte, " 42")
    served.says(tokens)
    answer = served.client.completions.create(
        model=BYTE, prompt=prompt, max_tokens=len(tokens), logprobs=1, echo=True
    )
    (choice,) = answer.choices
    assert choice.text == "the answer is 42"
    assert choice.logprobs is not None
    assert choice.logprobs.tokens is not None
    assert "".join(choice.logprobs.tokens) == choice.text
    values = choice.logprobs.token_logprobs
    assert values == [None, *(-token / 1024 for token in [*prompt[1:], *tokens])]
    assert choice.logprobs.top_logprobs is not None
    assert choice.logprobs.top_logprobs[0] is None  # pyright: ignore[reportUnnecessaryComparison]
    assert served.job.request.prefix_hashes == (), "every position must be computed"
    streamed = served.client.completions.create(
        model=BYTE, prompt="the answer is", max_tokens=len(tokens), echo=True, stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in streamed) == "the answer is 42"


def test_sentencepiece_spaces_and_bytes(served: Served, piece: Tokenizer) -> None:
    served.says([*ids(piece, "world 👋🏽 is"), EOS])
    stream = served.client.completions.create(
        model=PIECE, prompt="hello", max_tokens=99, stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in stream) == " world 👋🏽 is"


def test_timing_headers(served: Served, byte: Tokenizer) -> None:
    served.says(ids(byte, "hello"))
    for stream in (False, True):
        body = {"model": BYTE, "prompt": "x", "max_tokens": 2, "stream": stream}
        headers = served.http.post("/v1/completions", json=body).headers
        assert headers["x-c2cserve-slice"] == TIMING.slice
        assert headers["x-c2cserve-switched"] == "true"
        assert float(headers["x-c2cserve-switch-ms"]) == TIMING.switch_s * 1e3


def test_timing_headers_of_a_stream_whose_second_choice_begins(
    served: Served, byte: Tokenizer
) -> None:
    """Headers go out with the first piece, whichever choice it is of."""

    def play(job: Job) -> Play:
        late_s = 0.2 if job.tokens[0] == 40 else 0.0
        return Play([*ids(byte, "hello"), EOS], delay_s=late_s)

    served.plays(play)
    body = {"model": BYTE, "prompt": [[40], [41]], "max_tokens": 2, "stream": True}
    headers = served.http.post("/v1/completions", json=body).headers
    assert headers["x-c2cserve-slice"] == TIMING.slice


async def test_the_async_client_many_at_once(served: Served, byte: Tokenizer) -> None:
    def play(job: Job) -> Play:
        return Play([*job.tokens[-3:], EOS], delay_s=0.001)

    served.plays(play)
    async with openai.AsyncOpenAI(
        base_url=f"{served.url}/v1", api_key="none", max_retries=0
    ) as client:

        async def one(i: int) -> str:
            prompt = [40 + i, 41 + i, 42 + i]
            if i % 2:
                answer = await client.completions.create(model=BYTE, prompt=prompt, max_tokens=9)
                return answer.choices[0].text
            stream = await client.completions.create(
                model=BYTE, prompt=prompt, max_tokens=9, stream=True
            )
            return "".join([chunk.choices[0].text async for chunk in stream])

        texts = await asyncio.gather(*(one(i) for i in range(40)))
    assert texts == [byte.decode([40 + i, 41 + i, 42 + i]) for i in range(40)]


# ---- a prompt without an output -----------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("token", [EOS, 50])
def test_only_the_prompt(served: Served, byte: Tokenizer, stream: bool, token: int) -> None:
    served.says([token])
    body = {"model": BYTE, "prompt": "the answer", "max_tokens": 0, "echo": True, "logprobs": 1}
    if stream:
        options = {"include_usage": True}
        chunks = list(
            served.client.completions.create(stream=True, stream_options=options, **body)  # pyright: ignore
        )
        assert len(chunks) == 2
        (choice,), usage = chunks[0].choices, chunks[1].usage
    else:
        answer = served.client.completions.create(**body)  # pyright: ignore
        (choice,), usage = answer.choices, answer.usage
    prompt = byte.encode("the answer").ids
    assert (choice.text, choice.finish_reason) == ("the answer", "length")
    assert choice.logprobs is not None
    assert choice.logprobs.tokens is not None
    assert len(choice.logprobs.tokens) == len(prompt)
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(prompt), 0)


def test_only_the_prompt_may_fill_the_context(served: Served) -> None:
    body = {"model": BYTE, "prompt": [9] * 256, "max_tokens": 0, "echo": True}
    assert served.http.post("/v1/completions", json=body).status_code == 200
    body["prompt"] = [9] * 257
    answer = served.http.post("/v1/completions", json=body)
    assert answer.json()["error"]["code"] == "context_length_exceeded"


def test_no_output_needs_echo(served: Served) -> None:
    answer = served.http.post(
        "/v1/completions", json={"model": BYTE, "prompt": "x", "max_tokens": 0}
    )
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "max_tokens"
    chat = {"model": BYTE, "messages": HELLO, "max_tokens": 0}
    answer = served.http.post("/v1/chat/completions", json=chat)
    assert answer.json()["error"]["param"] == "max_tokens"
