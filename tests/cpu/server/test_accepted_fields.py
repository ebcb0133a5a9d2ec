"""Fields that today's clients send, and that change nothing here, are accepted."""

import inspect
from typing import Any

import pytest
from openai.resources.chat.completions import Completions as ChatResource
from openai.resources.completions import Completions as CompletionResource
from served import BYTE, Served
from small_tokenizers import EOS
from tokenizers import Tokenizer

from c2cserve.server.fields import ChatBody, CompletionBody

COMPLETION: dict[str, Any] = {"model": BYTE, "prompt": "hello", "max_tokens": 3}
CHAT: dict[str, Any] = {"model": BYTE, "messages": [{"role": "user", "content": "hello"}]}
PATHS = {"completions": ("/v1/completions", COMPLETION), "chat": ("/v1/chat/completions", CHAT)}

BOTH = [
    ("user", "u"), ("safety_identifier", "s"), ("prompt_cache_key", "k"), ("store", True),
    ("store", False), ("metadata", {"a": "b"}), ("service_tier", "auto"),
    ("service_tier", "priority"), ("skip_special_tokens", True),
    ("spaces_between_special_tokens", True), ("include_stop_str_in_output", False),
    ("use_beam_search", False), ("length_penalty", 1.0), ("prompt_cache_retention", "in_memory"),
    ("return_token_ids", False), ("return_tokens_as_token_ids", False), ("prompt_logprobs", None),
    ("truncate_prompt_tokens", None), ("allowed_token_ids", None), ("bad_words", None),
]  # fmt: skip
IN_CHATS = [
    ("reasoning_effort", "low"), ("parallel_tool_calls", True), ("parallel_tool_calls", False),
    ("tool_choice", "none"), ("add_generation_prompt", True), ("continue_final_message", False),
    ("add_special_tokens", False), ("echo", False), ("verbosity", "medium"),
    ("include_reasoning", True),
]  # fmt: skip
IN_COMPLETIONS = [("add_special_tokens", True)]


@pytest.mark.parametrize(
    ("api", "field", "value"),
    [
        *((api, *one) for api in PATHS for one in BOTH),
        *(("chat", *one) for one in IN_CHATS),
        *(("completions", *one) for one in IN_COMPLETIONS),
    ],
)
def test_accepted(served: Served, api: str, field: str, value: object) -> None:
    path, body = PATHS[api]
    answer = served.http.post(path, json={**body, field: value})
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("skip_special_tokens", False), ("include_stop_str_in_output", True),
        ("use_beam_search", True), ("length_penalty", 0.5), ("service_tier", "gold"),
        ("safety_identifier", 7), ("prompt_cache_key", ["k"]), ("return_token_ids", True),
        ("prompt_logprobs", 1), ("bad_words", ["x"]),
    ],
)  # fmt: skip
@pytest.mark.parametrize("api", list(PATHS))
def test_other_values_of_them_are_refused(
    served: Served, api: str, field: str, value: object
) -> None:
    path, body = PATHS[api]
    answer = served.http.post(path, json={**body, field: value})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == field


@pytest.mark.parametrize(
    ("resource", "body"), [(ChatResource, ChatBody), (CompletionResource, CompletionBody)]
)
def test_each_parameter_of_the_client_is_known(resource: Any, body: Any) -> None:
    """Every parameter of OpenAI's client is a field here, if only one that is refused by name."""
    parameters = set(inspect.signature(resource.create).parameters)
    own = {"self", "extra_headers", "extra_query", "extra_body", "timeout"}
    assert parameters - own <= set(body.model_fields)


def test_the_service_tier_is_the_one_that_was_used(served: Served) -> None:
    answer = served.client.chat.completions.create(service_tier="priority", **CHAT)
    assert answer.service_tier == "default"
    chunks = list(served.client.chat.completions.create(service_tier="auto", stream=True, **CHAT))
    assert {chunk.service_tier for chunk in chunks} == {"default"}
    assert "service_tier" not in served.http.post("/v1/chat/completions", json=CHAT).json()


def test_reasoning_effort_is_for_the_template() -> None:
    def variables(**fields: Any) -> dict[str, Any]:
        return ChatBody(**{**CHAT, **fields}).template_variables

    assert variables() == {}
    low = {"reasoning_effort": "low", "enable_thinking": True}
    assert variables(reasoning_effort="low") == low
    none = {"reasoning_effort": "none", "enable_thinking": False}
    assert variables(reasoning_effort="none") == none
    own = {"enable_thinking": False, "other": 1}
    both = variables(reasoning_effort="low", chat_template_kwargs=own)
    assert both == {"reasoning_effort": "low", **own}


# ---- options of streams -------------------------------------------------------------------------


def test_usage_in_every_chunk(served: Served, byte: Tokenizer) -> None:
    output = [*byte.encode("你好 the answer", add_special_tokens=False).ids, EOS]
    served.says(output, cached_tokens=2)
    chunks = list(
        served.client.completions.create(
            model=BYTE, prompt="hello", max_tokens=50, stream=True,
            stream_options={
                "include_usage": True, "continuous_usage_stats": True, "include_obfuscation": True,
            },  # pyright: ignore[reportArgumentType]
        )
    )  # fmt: skip
    prompt = len(byte.encode("hello").ids)
    counts: list[int] = []
    for chunk in chunks:
        assert chunk.usage is not None
        assert chunk.usage.prompt_tokens == prompt
        assert chunk.usage.total_tokens == prompt + chunk.usage.completion_tokens
        counts.append(chunk.usage.completion_tokens)
    assert counts[0] >= 1
    assert counts == sorted(counts)
    assert counts[-2:] == [len(output), len(output)]
    assert chunks[-1].choices == []


def test_usage_in_every_chunk_is_of_its_choice(served: Served, byte: Tokenizer) -> None:
    served.says(byte.encode("one two", add_special_tokens=False).ids)
    stream = served.client.chat.completions.create(
        n=2, stream=True, max_completion_tokens=4,
        stream_options={"include_usage": True, "continuous_usage_stats": True},  # pyright: ignore[reportArgumentType]
        **CHAT,
    )  # fmt: skip
    last = {0: 0, 1: 0}
    for chunk in stream:
        assert chunk.usage is not None
        for choice in chunk.choices:
            assert chunk.usage.completion_tokens > last[choice.index] or choice.finish_reason
            last[choice.index] = chunk.usage.completion_tokens
    assert last == {0: 4, 1: 4}


def test_usage_in_every_chunk_needs_usage(served: Served) -> None:
    options = {"continuous_usage_stats": True}
    body = {**COMPLETION, "stream": True, "stream_options": options}
    answer = served.http.post("/v1/completions", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "stream_options.continuous_usage_stats"


def test_no_padding_is_sent(served: Served) -> None:
    for wanted in (True, False):
        body = {**CHAT, "stream": True, "stream_options": {"include_obfuscation": wanted}}
        answer = served.http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200
        assert "obfuscation" not in answer.text
