"""Chat templates: rendered by Jinja in a sandbox, with the conventions of checkpoint authors.

The sandbox bounds what a template can access, not how long it runs. So it is rendered in a process
that can be killed (server/text/process.py).
"""

import json
import re
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
from jinja2.ext import loopcontrols

from c2cserve.files.reading import CONFIG_BYTES_MAX, one_line, read_object, read_text
from c2cserve.server.text.contents import ContentForms
from c2cserve.server.text.vocabulary import TokenizerError
from c2cserve.server.tools.call_ids import shortened
from c2cserve.server.tools.reading import ARGUMENTS_MARK, CALLS_MARK, CallFormat

_WRONG_KIND = (KeyError, TypeError, ValueError, AttributeError, ArithmeticError, MemoryError)
"""Exceptions of reading templates that are not as assumed."""
_PROBE_CHARS = 1 << 18
"""Characters of a chat that only tries a template."""


class ChatTemplate:
    """A model's template, with the special tokens it may name."""

    def __init__(self, directory: Path) -> None:
        """Read and parse the template. Raises TokenizerError and FileProblem."""
        config = read_object(directory / "tokenizer_config.json", CONFIG_BYTES_MAX) or {}
        self._specials = _special_tokens(config)
        sources = _sources(directory, config)
        source = sources.get("default")
        self.source = source or ""
        self._template = None if source is None else _compiled(directory, source)
        # Some checkpoints have a template of its own for chats with tools.
        of_tools = sources.get("tool_use", source)
        self._of_tools = self._template
        if of_tools is not None and of_tools != source:
            self._of_tools = _compiled(directory, of_tools)
        self.call_format: CallFormat | None = _call_format(of_tools or "")
        self._contents = ContentForms(
            source or "", lambda messages: self._write(messages, {}, _PROBE_CHARS)
        )

    def render(
        self, messages: list[dict[str, Any]], extra: dict[str, Any], chars_max: int | None = None,
        *, prompted: bool = True,
    ) -> str:  # fmt: skip
        """Return the chat as the model's template writes it. `prompted`: with the beginning of the
        answer.

        Raises TokenizerError if there is no template, if it refuses the chat or fails (with its
        line), or if it writes more than `chars_max` characters.
        """
        if self._template is None:
            raise TokenizerError("the model has no chat template; use /v1/completions")
        if self.call_format in ("mistral", "mistral_args"):
            messages = shortened(messages)
        shaped = self._contents.shaped(messages)
        return self._write(shaped, {**extra, "add_generation_prompt": prompted}, chars_max)

    def _write(
        self, messages: list[dict[str, Any]], extra: dict[str, Any], chars_max: int | None
    ) -> str:
        template = self._of_tools if "tools" in extra else self._template
        assert template is not None
        variables = {"messages": messages, **self._specials}
        parts: list[str] = []
        size = 0
        try:
            for part in template.generate({**extra, **variables}):
                parts.append(part)
                size += len(part)
                if chars_max is not None and size > chars_max:
                    raise TokenizerError(
                        f"the model's chat template makes more than {chars_max} characters of this"
                        " chat, the server's limit (--max-prompt-chars)"
                    )
        except TokenizerError:
            raise
        except Exception as error:  # a template calls methods of anything it is given
            kind = "" if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: "
            raise TokenizerError(
                f"the model's chat template refuses this chat{_line(error)}: {kind}{error}"
            ) from error
        return "".join(parts)


def _line(error: BaseException) -> str:
    """Return the line of the template where an error arose: Jinja's tracebacks have these lines."""
    where, trace = "", error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "<template>":
            where = f" (line {trace.tb_lineno})"
        trace = trace.tb_next
    return where


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    names = ("bos_token", "eos_token", "pad_token", "unk_token")
    found: dict[str, str] = {}
    for name in names:
        value = config.get(name)
        value = value.get("content") if isinstance(value, dict) else value
        if isinstance(value, str):
            found[name] = value
    return found


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks what a model is trained on; rendering ignores it."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's way of declaring tags

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _call_format(source: str) -> CallFormat | None:
    """Return the format of calls that a template asks for: it shows the model an example."""
    if "tools" not in source:
        return None
    if "<tool_call>" in source:
        # Newer Qwen coders and GLM write XML between the same tags.
        return None if "<function=" in source or "<arg_key>" in source else "hermes"
    if CALLS_MARK in source:
        return "mistral_args" if ARGUMENTS_MARK in source else "mistral"
    return "llama3" if re.search(r'\\?"parameters\\?"', source) else None


def _sources(directory: Path, config: dict[str, Any]) -> dict[str, str]:
    """Return name -> template: the one in chat_template.jinja, or else those in
    tokenizer_config.json. Raises TokenizerError and FileProblem."""
    written: Any = config.get("chat_template")
    own = read_text(directory / "chat_template.jinja", CONFIG_BYTES_MAX)
    if own is not None:
        written = own
    named = written if isinstance(written, list) else [{"name": "default", "template": written}]
    try:
        sources = {one["name"]: one["template"] for one in named if one["template"]}
        if not all(isinstance(text, str) for text in (*sources, *sources.values())):
            raise TypeError("a template or its name is not a text")
        return sources
    except _WRONG_KIND as error:
        raise _unreadable(directory, error) from error


def _compiled(directory: Path, source: str) -> jinja2.Template:
    """Return the template of a source. Raises TokenizerError."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
    )

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: object, ensure_ascii: bool = False, **form: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **form)

    def strftime_now(form: str) -> str:
        return datetime.now().astimezone().strftime(form)

    environment.filters["tojson"] = tojson
    functions: dict[str, Any] = {"raise_exception": raise_exception, "strftime_now": strftime_now}
    environment.globals.update(functions)
    try:
        return environment.from_string(source)
    except (jinja2.TemplateError, RecursionError, *_WRONG_KIND) as error:
        raise _unreadable(directory, error) from error


def _unreadable(directory: Path, error: BaseException) -> TokenizerError:
    return TokenizerError(f"{directory}: the chat template cannot be read: {one_line(error)}")
