"""Requests of many choices as the official client sees them: one refusal, one stream, and an end
for each choice."""

import time
from collections import Counter

import openai
import pytest
from fake_gateway import Play
from served import BYTE, Served
from tokenizers import Tokenizer

from c2cserve.core.request import Job
from c2cserve.runtime.gateway import Refused


def ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False).ids


def test_choices_of_one_request_belong_together(served: Served, byte: Tokenizer) -> None:
    served.says(ids(byte, "a"))
    for prompt, count in (("x", 3), (["x", "y"], 2), ("x", 1), ("x", 7)):
        served.client.completions.create(model=BYTE, prompt=prompt, n=count, max_tokens=1)
    groups = Counter(job.request.group for job in served.gateway.jobs)
    assert sorted(groups.values()) == [1, 3, 4, 7]
    assert groups[""] == 1, "a single choice belongs to none"


def test_a_stop_string_ends_one_choice_and_the_others_go_on(
    served: Served, byte: Tokenizer
) -> None:
    def play(job: Job) -> Play:
        first = job.request.id == served.gateway.jobs[0].request.id if served.gateway.jobs else True
        text = "one STOP and more" if first else "abc" * 60
        return Play(ids(byte, text), delay_s=0.001, forever=first)

    served.plays(play)
    answer = served.client.completions.create(
        model=BYTE, prompt="x", n=3, max_tokens=60, stop=["STOP"]
    )
    ends = [choice.finish_reason for choice in answer.choices]
    assert ends == ["stop", "length", "length"]
    assert answer.choices[0].text == "one "
    assert answer.choices[1].text.startswith("abcabc")
    assert len(served.gateway.cancelled) == 1
    assert answer.usage is not None
    assert answer.usage.completion_tokens < 180


def test_a_stream_of_choices_has_each_whole_and_ends_each_once(
    served: Served, byte: Tokenizer
) -> None:
    served.says(ids(byte, "hello"), delay_s=0.001)
    texts, ends = Counter[int](), Counter[int]()
    stream = served.client.completions.create(
        model=BYTE, prompt="x", n=13, max_tokens=len(ids(byte, "hello")), stream=True
    )
    for chunk in stream:
        for choice in chunk.choices:
            assert not ends[choice.index]
            texts[choice.index] += len(choice.text)
            ends[choice.index] += choice.finish_reason is not None
    assert texts == dict.fromkeys(range(13), 5)
    assert ends == dict.fromkeys(range(13), 1)


def test_a_refusal_is_one_answer_and_ends_every_choice(served: Served) -> None:
    served.plays(lambda job: Play(refuse=Refused(429, "too much", 2.0)))
    with pytest.raises(openai.RateLimitError):
        served.client.completions.create(model=BYTE, prompt="x", n=16, max_tokens=5)
    assert len(served.gateway.ended) == 16


def test_a_client_that_leaves_ends_every_choice(served: Served, byte: Tokenizer) -> None:
    served.says(ids(byte, "a"), delay_s=0.002, forever=True)
    with served.client.completions.create(
        model=BYTE, prompt="x", n=16, max_tokens=200, stream=True
    ) as stream:
        next(iter(stream))
    until_s = time.monotonic() + 10
    while len(served.gateway.ended) < 16:
        assert time.monotonic() < until_s
        time.sleep(0.01)
