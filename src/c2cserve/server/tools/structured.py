"""The fields of requests that say what an output is held to."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

_CHOICES_MAX = 1024


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class TextFormat(_Strict):
    type: Literal["text"] = "text"


class JsonObjectFormat(_Strict):
    type: Literal["json_object"]


class NamedSchema(_Strict):
    name: Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_-]+$", max_length=64)]
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    """The schema; None allows any JSON object."""
    strict: bool | None = None
    """Accepted, and without effect: outputs are always held to the schema."""


class JsonSchemaFormat(_Strict):
    type: Literal["json_schema"]
    json_schema: NamedSchema


ResponseFormat = Annotated[
    TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")
]
FORMATS = ("text", "json_object", "json_schema")


class StructuredOutputs(_Strict):
    """vLLM's field: one of these."""

    json_: dict[str, Any] | str | None = Field(None, alias="json")
    """A JSON schema, or its text."""
    json_object: Literal[True] | None = None
    regex: Annotated[str, Field(min_length=1)] | None = None
    choice: (
        Annotated[
            list[Annotated[str, Field(min_length=1)]],
            Field(min_length=1, max_length=_CHOICES_MAX, fail_fast=True),
        ]
        | None
    ) = None
    grammar: Annotated[str, Field(min_length=1)] | None = None
    """A grammar in Lark's language or GBNF."""

    @property
    def kinds(self) -> list[str]:
        """The fields that are given, by their names in requests."""
        names = {"json_": "json"}
        given = self.model_dump(exclude_none=True)
        return [names.get(name, name) for name in given]


class NamedFunction(_Strict):
    name: str


class NamedTool(_Strict):
    """`tool_choice`: this tool is called."""

    type: Literal["function"]
    function: NamedFunction
