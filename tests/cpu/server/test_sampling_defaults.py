"""A checkpoint's sampling defaults apply where a request says nothing."""

from dataclasses import replace
from typing import Any

import pytest
from served import BYTE, Served

from c2cserve.core.request import SamplingDefaults

DEFAULTS = SamplingDefaults(0.6, 0.95, 20, 0.05, 1.1, 40)
CHAT: dict[str, Any] = {"model": BYTE, "messages": [{"role": "user", "content": "hello"}]}


@pytest.fixture
def recommending(served: Served) -> Served:
    files = served.gateway.files[BYTE]
    served.gateway.files[BYTE] = replace(files, defaults=DEFAULTS)
    return served


def used(served: Served) -> tuple[float, ...]:
    sampling = served.job.sampling
    return (
        sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p,
        sampling.repetition_penalty,
    )  # fmt: skip


def test_defaults_apply(recommending: Served) -> None:
    recommending.client.chat.completions.create(**CHAT)
    assert used(recommending) == (0.6, 0.95, 20, 0.05, 1.1)
    assert recommending.job.request.max_new_tokens == 40
    recommending.client.completions.create(model=BYTE, prompt="hello")
    assert used(recommending) == (0.6, 0.95, 20, 0.05, 1.1)
    assert recommending.job.request.max_new_tokens == 16, "OpenAI's default, which is less"


def test_a_request_overrides_each_of_them(recommending: Served) -> None:
    recommending.client.chat.completions.create(
        temperature=0, top_p=1, max_completion_tokens=50,
        extra_body={"top_k": 0, "min_p": 0, "repetition_penalty": 1}, **CHAT,
    )  # fmt: skip
    assert used(recommending) == (0.0, 1.0, 0, 0.0, 1.0)
    assert recommending.job.request.max_new_tokens == 50


def test_output_never_exceeds_the_context_by_default(recommending: Served) -> None:
    long = {"model": BYTE, "messages": [{"role": "user", "content": "7 " * 100}]}
    recommending.client.chat.completions.create(**long)
    request = recommending.job.request
    assert request.prompt_len + request.max_new_tokens == 256


def test_output_of_completions_is_shorter_where_the_checkpoint_says_so(served: Served) -> None:
    files = replace(served.gateway.files[BYTE], defaults=SamplingDefaults(max_new_tokens=4))
    served.gateway.files[BYTE] = files
    served.client.completions.create(model=BYTE, prompt="hello")
    assert served.job.request.max_new_tokens == 4
