"""LangChain with its integration of OpenAI."""

from typing import Any

from checks import (
    ANSWER,
    CALLER,
    KEY,
    MODEL,
    PERSON,
    QUESTION,
    TOOL,
    URL,
    check_city,
    check_person,
    feature,
    same,
)  # fmt: skip
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAI


def made(model: str = MODEL, **more: Any) -> ChatOpenAI:
    return ChatOpenAI(
        model=model, base_url=f"{URL}/v1", api_key=KEY, temperature=0, max_retries=0, **more
    )


def chat() -> None:
    same(made().invoke(QUESTION).content, ANSWER)
    same([one.content for one in made().batch([QUESTION] * 3)], [ANSWER] * 3)


def stream() -> None:
    chunks = list(made(stream_usage=True).stream(QUESTION))
    same("".join(str(one.content) for one in chunks), ANSWER)
    assert any(one.usage_metadata for one in chunks)


def text() -> None:
    llm = OpenAI(
        model="sorter-llama", base_url=f"{URL}/v1", api_key=KEY, temperature=0, max_tokens=8
    )
    same(llm.invoke("sort: dcba =>").strip(), "abcd")


def tools() -> None:
    llm = made(CALLER, max_tokens=300)
    forced = llm.bind_tools([TOOL], tool_choice="required")
    asked: list[Any] = [HumanMessage("How is the weather?")]
    answer: Any = forced.invoke(asked)
    for call in answer.tool_calls:
        check_city(call["args"])
    results = [ToolMessage("sunny", tool_call_id=call["id"]) for call in answer.tool_calls]
    llm.bind_tools([TOOL]).invoke([*asked, answer, *results])


def structured() -> None:
    for method in ("json_schema", "function_calling"):
        model = CALLER if method == "function_calling" else "chat"
        llm = made(model, max_tokens=400).with_structured_output(
            {"title": "person", **PERSON}, method=method
        )
        check_person(llm.invoke(QUESTION))


def responses() -> None:
    same(made(use_responses_api=True).invoke(QUESTION).text, ANSWER)


def errors() -> None:
    try:
        made("adder-qwem").invoke(QUESTION)
    except Exception as error:  # its own kind
        assert MODEL in str(error), error
    else:
        raise AssertionError("no error")


for check in (chat, stream, text, tools, structured, responses, errors):
    feature(check.__name__, check)
