"""A model's tokenizer and chat template, without the model's framework.

`tokenizers` does the work (and releases the interpreter lock); templates are rendered by Jinja in a
sandbox, with the conventions checkpoint authors write them for.
"""

import hashlib
import json
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.sandbox
import numpy as np
from jinja2.ext import loopcontrols
from tokenizers import Tokenizer as FastTokenizer

from c2cserve.core.request import BLOCK_TOKENS


class TokenizerError(ValueError):
    """The model's tokenizer or template can not be used; says why."""


class Tokenizer:
    """Thread-safe."""

    def __init__(self, directory: Path) -> None:
        """Raises TokenizerError."""
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise TokenizerError(
                f"{path}: no such file; save the tokenizer in the fast format "
                "(AutoTokenizer.from_pretrained(...).save_pretrained(...))"
            )
        try:
            self._fast: Any = FastTokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exceptions
            raise TokenizerError(f"{path}: {error}") from error
        self._config = _read_json(directory / "tokenizer_config.json")
        self._templates = _templates(directory, self._config)
        self._salt = hashlib.blake2b(str(directory).encode(), digest_size=16).digest()
        self._texts: dict[int, tuple[str, list[int]]] = {}
        self._byte_level = '"ByteLevel"' in str(self._fast.decoder.__getstate__())

    # ---- text to tokens -------------------------------------------------------------------------

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """`special`: add what the tokenizer adds around a text (BOS)."""
        return self._fast.encode(text, add_special_tokens=special).ids

    def render(self, messages: list[dict[str, Any]], extra: dict[str, Any]) -> str:
        """The chat as the model's template writes it. Raises TokenizerError."""
        template = self._templates.get("default")
        if template is None:
            raise TokenizerError("the model has no chat template; use /v1/completions")
        try:
            return template.render(
                messages=messages,
                add_generation_prompt=True,
                **_special_tokens(self._config),
                **extra,
            )
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise TokenizerError(f"the model's chat template refuses this chat: {error}") from error

    def prefix_hashes(self, tokens: list[int]) -> tuple[int, ...]:
        """A chained 64-bit hash per full block: equal for equal prefixes, and nothing else."""
        data = np.asarray(tokens, np.uint32).tobytes()
        size, digest = BLOCK_TOKENS * 4, self._salt
        hashes: list[int] = []
        for start in range(0, len(data) - size + 1, size):
            digest = hashlib.blake2b(digest + data[start : start + size], digest_size=16).digest()
            hashes.append(int.from_bytes(digest[:8], "little"))
        return tuple(hashes)

    # ---- tokens to text -------------------------------------------------------------------------

    def decode(self, ids: list[int]) -> str:
        """Without special tokens."""
        return self._fast.decode(ids, skip_special_tokens=True)

    def token_text(self, token: int) -> tuple[str, list[int]]:
        """One token for log-probabilities: its text and its bytes."""
        known = self._texts.get(token)
        if known is None:
            known = self._texts[token] = self._token_text(token)
        return known

    def _token_text(self, token: int) -> tuple[str, list[int]]:
        piece: str | None = self._fast.id_to_token(token)
        text: str = self._fast.decode([token], skip_special_tokens=False)
        if piece is None:
            return text, list(text.encode())
        if self._byte_level and all(char in _BYTES for char in piece):
            return text, [_BYTES[char] for char in piece]
        if len(piece) == 6 and piece.startswith("<0x"):
            return text, [int(piece[3:5], 16)]
        return text, list(text.encode())


class Detokenizer:
    """Text of a growing output, exact to the character.

    A token's text depends on its neighbours (spaces of sentencepiece, bytes of one character in two
    tokens), so new text is the difference of two decodings of a short window, and is held back
    while it ends in the middle of a character.
    """

    _CONTEXT = 6

    def __init__(self, tokenizer: Tokenizer, prompt: list[int]) -> None:
        self._tokenizer = tokenizer
        self._ids = prompt[-self._CONTEXT :]
        self._prefix = 0
        self._read = len(self._ids)

    def add(self, tokens: tuple[int, ...]) -> str:
        text = ""
        for token in tokens:
            self._ids.append(token)
            text += self._new(final=False)
        return text

    def finish(self) -> str:
        """What was held back."""
        return self._new(final=True)

    def _new(self, *, final: bool) -> str:
        before = self._tokenizer.decode(self._ids[self._prefix : self._read])
        after = self._tokenizer.decode(self._ids[self._prefix :])
        if len(after) <= len(before) or (after.endswith("\N{REPLACEMENT CHARACTER}") and not final):
            return ""
        self._ids = self._ids[self._prefix :]  # the window never grows
        self._prefix, self._read = self._read - self._prefix, len(self._ids)
        return after[len(before) :]


class StopStrings:
    """Cuts a text at the first of some strings, also when one arrives in pieces."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._held = ""

    def add(self, text: str) -> tuple[str, bool]:
        """Text that can be shown now, and whether a stop string was found."""
        if not self._stops:
            return text, False
        self._held += text
        found = [at for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            return self._held[: min(found)], True
        keep = max(self._overlap(stop) for stop in self._stops)
        cut = len(self._held) - keep
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown, False

    def finish(self) -> str:
        held, self._held = self._held, ""
        return held

    def _overlap(self, stop: str) -> int:
        """Length of the longest end of the text that begins the stop string."""
        for size in range(min(len(stop) - 1, len(self._held)), 0, -1):
            if self._held.endswith(stop[:size]):
                return size
        return 0


def _byte_table() -> dict[str, int]:
    """Byte-level BPE writes every byte as a printable character: the inverse of that."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(others)}


_BYTES = _byte_table()


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text())
    except ValueError as error:
        raise TokenizerError(f"{path}: not valid JSON: {error}") from error
    return value if isinstance(value, dict) else {}


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    names = ("bos_token", "eos_token", "pad_token", "unk_token")
    found: dict[str, str] = {}
    for name in names:
        value = config.get(name)
        value = value.get("content") if isinstance(value, dict) else value
        if isinstance(value, str):
            found[name] = value
    return found


def _templates(directory: Path, config: dict[str, Any]) -> dict[str, jinja2.Template]:
    """chat_template.jinja if there is one, else what tokenizer_config.json says."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: object, indent: int | None = None) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent)

    def strftime_now(form: str) -> str:
        return datetime.now().astimezone().strftime(form)

    environment.filters["tojson"] = tojson
    functions: dict[str, Any] = {"raise_exception": raise_exception, "strftime_now": strftime_now}
    environment.globals.update(functions)
    written: Any = config.get("chat_template")
    own = directory / "chat_template.jinja"
    if own.is_file():
        written = own.read_text()
    named = written if isinstance(written, list) else [{"name": "default", "template": written}]
    try:
        return {
            one["name"]: environment.from_string(one["template"])
            for one in named
            if one["template"]
        }
    except (jinja2.TemplateError, KeyError, TypeError) as error:
        raise TokenizerError(f"{directory}: the chat template can not be read: {error}") from error
