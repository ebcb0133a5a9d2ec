"""The grammar of a request's outputs: from its fields, for the model's vocabulary.

Everything that can be wrong with a schema is found here, in a text process, and named by its field.
"""

import json

from c2cserve.core.request import Grammar
from c2cserve.grammars import write
from c2cserve.grammars.table import write_table
from c2cserve.server.errors import ApiError
from c2cserve.server.fields import ChatBody, CompletionBody
from c2cserve.server.text.limits import within
from c2cserve.server.text.messages import Target
from c2cserve.server.text.tokenizer import Tokenizer
from c2cserve.server.tools.calls import called, mixed
from c2cserve.server.tools.reading import ReadingPlan
from c2cserve.server.tools.structured import JsonObjectFormat, JsonSchemaFormat, StructuredOutputs

_SCHEMA = "response_format.json_schema.schema"


def guided(body: CompletionBody | ChatBody) -> bool:
    """Return whether an output is held to anything."""
    if body.structured_outputs is not None:
        return True
    if isinstance(body.response_format, JsonObjectFormat | JsonSchemaFormat):
        return True
    return isinstance(body, ChatBody) and (bool(body.forced) or strict(body))


def strict(body: ChatBody) -> bool:
    """Return whether the model chooses if it calls, and a tool asks for its schema to be held."""
    return not body.forced and any(tool.function.strict for tool in body.offered)


def grammar_for(
    body: CompletionBody | ChatBody, tokenizer: Tokenizer, target: Target,
    plan: ReadingPlan | None, chars_max: int,
) -> Grammar | None:  # fmt: skip
    """Return the grammar of a request's outputs, None if they are free. `plan`: how they are read.
    `chars_max`: the most characters of its fields. Raises ApiError (400), which names the field."""
    if not guided(body):
        return None
    param = _param(body)
    if tokenizer.kind == "other" or not target.eos_token_ids:
        lack = "an end token" if tokenizer.kind != "other" else "tokens that stand for fixed bytes"
        raise ApiError(
            400, f"{param}: this model's vocabulary has not {lack}, so no output can be held to"
            " a grammar", param=param, code="unsupported_parameter",
        )  # fmt: skip
    within(param, f"{param} has {(size := _chars(body))} characters", size, chars_max,
           "grammar-chars")  # fmt: skip
    thought = ""
    if plan is not None and plan.reasoning:
        # A model that was never taught the tag would not know how to end a thought either.
        thought = "open" if plan.thinking else "free" if tokenizer.thinks else ""
    try:
        text = _text(body, thought, tokenizer, plan)
    except write.GrammarError as error:
        raise ApiError(400, f"{param}: {error}", param=param) from error
    path = write_table(target.tables, tokenizer.table(target.vocab_size))
    return Grammar(text, path, target.eos_token_ids)


def _param(body: CompletionBody | ChatBody) -> str:
    if body.structured_outputs is not None:
        return f"structured_outputs.{body.structured_outputs.kinds[0]}"
    if isinstance(body.response_format, JsonSchemaFormat):
        return _SCHEMA
    return "tools" if isinstance(body, ChatBody) and body.offered else "response_format"


def _chars(body: CompletionBody | ChatBody) -> int:
    """Return the characters of what the grammar is made of."""
    given: list[object] = [body.structured_outputs and body.structured_outputs.model_dump()]
    given.append(body.response_format and body.response_format.model_dump())
    if isinstance(body, ChatBody):
        given += [tool.function.parameters for tool in body.offered]
    return sum(len(json.dumps(one, ensure_ascii=False)) for one in given if one is not None)


def _text(
    body: CompletionBody | ChatBody, thought: str, tokenizer: Tokenizer, plan: ReadingPlan | None
) -> str:
    if isinstance(body, ChatBody) and (body.forced or strict(body)):
        assert plan is not None
        assert plan.calls is not None
        tools = body.forced or body.offered
        for index, tool in enumerate(body.offered):
            _check_tool(f"tools.{index}.function.parameters", tool.function.parameters)
        single = body.parallel_tool_calls is False or not isinstance(body.tool_choice, str | None)
        if body.forced:
            answer, rules = called(tools, plan.calls, tokenizer.marks(plan.calls), single=single)
        else:
            answer, rules = mixed(tools, plan.calls)
        return write.grammar_of(answer, thought=thought, rules=rules)
    if body.structured_outputs is not None:
        return _of_vllm(body.structured_outputs, thought)
    given = body.response_format
    schema = given.json_schema.schema_ if isinstance(given, JsonSchemaFormat) else None
    answer = write.json_object() if schema is None else write.json_schema(schema)
    return write.grammar_of(answer, thought=thought)


def _check_tool(param: str, parameters: object) -> None:
    """Check one tool's schema, so that an error names it. Raises ApiError."""
    try:
        write.grammar_of(write.json_object() if parameters is None else
                         write.json_schema(parameters))  # fmt: skip
    except write.GrammarError as error:
        raise ApiError(400, f"{param}: {error}", param=param) from error


def _of_vllm(given: StructuredOutputs, thought: str) -> str:
    if given.grammar is not None:
        if thought:
            raise write.GrammarError("separate_reasoning needs another kind of structured output")
        return write.written(given.grammar)
    if given.regex is not None:
        return write.grammar_of(write.regex(given.regex), thought=thought)
    if given.choice is not None:
        return write.grammar_of(write.choice(given.choice), thought=thought)
    return write.grammar_of(_schema(given.json_), thought=thought)


def _schema(given: object) -> str:
    if given is None:
        return write.json_object()
    if not isinstance(given, str):
        return write.json_schema(given)
    try:
        return write.json_schema(json.loads(given))
    except ValueError as error:
        raise write.GrammarError(f"is not JSON: {error}") from error
