"""LlamaIndex with its integrations of OpenAI and of servers like it."""

from typing import Any, Literal

from checks import ANSWER, CALLER, KEY, MODEL, QUESTION, URL, feature, same
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel, ConfigDict, Field

ASKED = [ChatMessage(role="user", content=QUESTION)]


class Person(BaseModel):
    """A person."""

    model_config = ConfigDict(extra="forbid")
    name: str = Field(max_length=8)
    age: int = Field(ge=0, le=120)


def made(model: str = MODEL, **more: Any) -> OpenAILike:
    fields = {"is_chat_model": True, "temperature": 0, "max_tokens": 300, **more}
    return OpenAILike(
        model=model, api_base=f"{URL}/v1", api_key=KEY, context_window=512, max_retries=0, **fields
    )


def weather(city: Literal["Paris", "Rome"]) -> str:
    """Tell the weather."""
    return f"sunny in {city}"


def chat() -> None:
    same(made().chat(ASKED).message.content, ANSWER)


def stream() -> None:
    same("".join(one.delta or "" for one in made().stream_chat(ASKED)), ANSWER)


def text() -> None:
    llm = made("sorter-llama", is_chat_model=False, max_tokens=8)
    same(llm.complete("sort: dcba =>").text.strip(), "abcd")
    same("".join(one.delta or "" for one in llm.stream_complete("sort: dcba =>")).strip(), "abcd")


def tools() -> None:
    llm = made(CALLER, is_function_calling_model=True)
    answer = llm.predict_and_call(
        [FunctionTool.from_defaults(weather)], user_msg="How is it?", tool_required=True,
        error_on_no_tool_call=True,
    )  # fmt: skip
    assert "sunny" in str(answer), answer


def structured() -> None:
    llm = made(CALLER, is_function_calling_model=True)
    found: Any = llm.as_structured_llm(Person).chat(ASKED).raw
    assert 0 <= found.age <= 120, found
    llm = made("chat", should_use_structured_outputs=True, is_function_calling_model=False)
    found = llm.as_structured_llm(Person).chat(ASKED).raw
    assert 0 <= found.age <= 120, found


def errors() -> None:
    try:
        made("adder-qwem").chat(ASKED)
    except Exception as error:  # its own kind
        assert MODEL in str(error), error
    else:
        raise AssertionError("no error")


for check in (chat, stream, text, tools, structured, errors):
    feature(check.__name__, check)
