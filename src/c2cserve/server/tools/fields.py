"""The fields of tools in requests, and of the calls in messages that clients send back."""

import json
from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, field_validator

Name = Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_.-]+$", max_length=64)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class FunctionDefinition(_Strict):
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """JSON schema of the arguments. Calls that are forced are held to it, others if `strict`."""
    strict: bool | None = None


class Tool(_Strict):
    type: Literal["function"]
    function: FunctionDefinition

    def plain(self) -> dict[str, Any]:
        """Return the tool as templates expect it."""
        return self.model_dump(exclude_none=True)


class CalledFunction(_Strict):
    name: str
    arguments: str
    """A JSON object."""

    @field_validator("arguments")
    @classmethod
    def _object(cls, value: str) -> str:
        try:
            arguments = json.loads(value or "{}")
        except (ValueError, RecursionError) as error:
            raise ValueError("must be JSON") from error
        if not isinstance(arguments, dict):
            raise ValueError("must be a JSON object")
        return value


class ToolCall(_Strict):
    id: str
    type: Literal["function"]
    function: CalledFunction

    @property
    def chars(self) -> int:
        return len(self.function.name) + len(self.function.arguments)

    def plain(self) -> dict[str, Any]:
        """Return the call as templates expect it, its arguments an object."""
        arguments = cast("dict[str, Any]", json.loads(self.function.arguments or "{}"))
        function = {"name": self.function.name, "arguments": arguments}
        return {"id": self.id, "type": self.type, "function": function}


Tools = Annotated[list[Tool], Field(max_length=128, fail_fast=True)]
ToolCalls = Annotated[list[ToolCall], Field(min_length=1, fail_fast=True)]
