"""Instructor, in its modes that ask servers for a form."""

import instructor
import openai
from checks import CALLER, KEY, MESSAGES, URL, feature
from pydantic import BaseModel, ConfigDict, Field

MODES = {
    "tools": (instructor.Mode.TOOLS, CALLER),
    "structured": (instructor.Mode.JSON_SCHEMA, "chat"),
}


class Person(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: str = Field(max_length=8)
    age: int = Field(ge=0, le=120)


def api(mode: instructor.Mode) -> instructor.Instructor:
    client = openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0)
    return instructor.from_openai(client, mode=mode)


def formed(name: str) -> None:
    mode, model = MODES[name]
    found = api(mode).chat.completions.create(
        model=model,
        messages=MESSAGES,
        response_model=Person,
        max_tokens=400,
        max_retries=0,
        temperature=0,
    )
    assert 0 <= found.age <= 120, found


def stream() -> None:
    mode, model = MODES["structured"]
    parts = api(mode).chat.completions.create_partial(
        model=model,
        messages=MESSAGES,
        response_model=Person,
        max_tokens=400,
        max_retries=0,
        temperature=0,
    )
    last = list(parts)[-1]
    assert last.age is not None, last


for name in MODES:
    feature(name, lambda name=name: formed(name))
feature("stream", stream)
