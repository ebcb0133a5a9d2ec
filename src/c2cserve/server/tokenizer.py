"""A model's tokenizer and chat template, without the model's framework.

`tokenizers` does the work (and releases the interpreter lock); templates are rendered by Jinja in a
sandbox, with the conventions checkpoint authors write them for.
"""

import codecs
import hashlib
import json
from array import array
from collections.abc import Generator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
from jinja2.ext import loopcontrols
from tokenizers import Tokenizer as FastTokenizer

from c2cserve.core.request import BLOCK_TOKENS
from c2cserve.files.reading import (
    CONFIG_BYTES_MAX,
    TOKENIZER_BYTES_MAX,
    FileProblem,
    one_line,
    read_object,
    read_text,
)

_WRONG_KIND = (KeyError, TypeError, ValueError, AttributeError, ArithmeticError, MemoryError)
"""What templates that assume too much raise."""


class TokenizerError(ValueError):
    """The model's tokenizer or template can not be used; says why."""


@contextmanager
def _library(what: str) -> Generator[None]:
    """Whatever the tokenizers library raises, bare Exceptions and panics, as TokenizerError."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise TokenizerError(f"{what}: {one_line(error)}") from error
        raise


class Tokenizer:
    """Thread-safe."""

    def __init__(self, directory: Path, model: str = "") -> None:
        """`model` salts the prefix hashes. Raises TokenizerError."""
        path = directory / "tokenizer.json"
        try:
            text = read_text(path, TOKENIZER_BYTES_MAX)
            self._config = read_object(directory / "tokenizer_config.json", CONFIG_BYTES_MAX) or {}
            self._templates = _templates(directory, self._config)
        except FileProblem as problem:
            raise TokenizerError(str(problem)) from problem
        if text is None:
            raise TokenizerError(
                f"{path}: no such file; save the tokenizer in the fast format "
                "(AutoTokenizer.from_pretrained(...).save_pretrained(...))"
            )
        with _library(str(path)):
            self._fast: Any = FastTokenizer.from_str(text)
            # A file may say that texts are cut or filled up: what is asked is asked in full.
            self._fast.no_truncation()
            self._fast.no_padding()
        self._salt = hashlib.blake2b(model.encode(), digest_size=16).digest()
        self._texts: dict[int, tuple[str, list[int]]] = {}
        self._raws: dict[int, bytes] = {}
        self._specials = {
            number
            for number, added in self._fast.get_added_tokens_decoder().items()
            if added.special
        }
        self.kind, self.strips = _decoder_kind(self._fast)

    # ---- text to tokens -------------------------------------------------------------------------

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """`special`: add what the tokenizer adds around a text (BOS)."""
        with _library("the tokenizer cannot take this text"):
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
        except (jinja2.TemplateError, RecursionError, *_WRONG_KIND) as error:
            raise TokenizerError(f"the model's chat template refuses this chat: {error}") from error

    def prefix_hashes(self, tokens: list[int]) -> tuple[int, ...]:
        """A chained 64-bit hash per full block: equal for equal prefixes, and nothing else."""
        data = array("I", tokens).tobytes()
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
        if piece is None or token in self._specials or self.kind == "other":
            text: str = self._fast.decode([token], skip_special_tokens=False)
            return text, list(text.encode())
        byte = self.byte(token)
        raw = self.raw(token) if byte is None else bytes([byte])
        return raw.decode(errors="replace"), list(raw)

    def raw(self, token: int) -> bytes:
        """What the token adds to the text, where that does not depend on its neighbours (`kind` is
        not `other`); nothing for special tokens."""
        known = self._raws.get(token)
        if known is None:
            known = self._raws[token] = self._raw(token)
        return known

    def _raw(self, token: int) -> bytes:
        piece: str | None = self._fast.id_to_token(token)
        if piece is None or token in self._specials:
            return b""
        if self.kind == "pieces":
            return piece.replace("\u2581", " ").encode()
        # A token that was added as text is not spelled in the alphabet of bytes.
        spelled = all(char in _BYTES for char in piece)
        return bytes(_BYTES[char] for char in piece) if spelled else piece.encode()

    def byte(self, token: int) -> int | None:
        """The byte a byte-fallback token stands for."""
        raw = self.raw(token)
        if self.kind != "pieces" or len(raw) != 6 or not raw.startswith(b"<0x"):
            return None
        try:
            return int(raw[3:5], 16)
        except ValueError:
            return None


class Detokenizer:
    """Text of a growing output, exact to the character, at a constant cost per token.

    The concatenated text is what decoding prompt and output in one piece says after the prompt.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: list[int]) -> None:
        kinds = {"bytes": _ByteText, "pieces": _PieceText}
        self._text = kinds.get(tokenizer.kind, _WindowText)(tokenizer, prompt)

    def add(self, tokens: tuple[int, ...]) -> str:
        return "".join([self._text.add(token) for token in tokens])

    def finish(self) -> str:
        """What was held back."""
        return self._text.finish()


class _ByteText:
    """Byte-level BPE (Llama 3, Qwen): tokens are bytes, text is their UTF-8."""

    def __init__(self, tokenizer: Tokenizer, prompt: list[int]) -> None:
        self._raw = tokenizer.raw
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        # The prompt may end within a character; more than four bytes back there is no such one.
        tail = b""
        for token in reversed(prompt):
            tail = self._raw(token) + tail
            if len(tail) >= 4:
                break
        self._decoder.decode(tail)

    def add(self, token: int) -> str:
        return self._decoder.decode(self._raw(token))

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class _PieceText:
    """SentencePiece with byte fallback (Llama 2, Mistral): tokens are text, or one byte each.

    A run of bytes is text if all of it is UTF-8, else a replacement character per byte: it is held
    until it ends. The first space of a text is not shown, if nothing was shown before.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: list[int]) -> None:
        self._tokenizer = tokenizer
        self._run = bytearray()
        self._strip = tokenizer.strips and not any(tokenizer.raw(t) for t in reversed(prompt))
        for token in reversed(prompt[-4:]):
            byte = tokenizer.byte(token)
            if byte is None:
                break
            self._run.insert(0, byte)
        # Of a run the prompt ends in, only an unfinished character belongs to the output.
        whole = codecs.getincrementaldecoder("utf-8")("ignore")
        whole.decode(bytes(self._run))
        self._run = bytearray(whole.getstate()[0])

    def add(self, token: int) -> str:
        byte = self._tokenizer.byte(token)
        if byte is not None:
            self._run.append(byte)
            return ""
        raw = self._tokenizer.raw(token)
        return self.finish() + self._shown(raw.decode()) if raw else ""

    def finish(self) -> str:
        if not self._run:
            return ""
        run, self._run = bytes(self._run), bytearray()
        try:
            return self._shown(run.decode())
        except UnicodeDecodeError:
            return self._shown("\N{REPLACEMENT CHARACTER}" * len(run))

    def _shown(self, text: str) -> str:
        if self._strip:
            self._strip = False
            return text.removeprefix(" ")
        return text


class _WindowText:
    """Any other decoder: the difference of two decodings of a short window, held back while it ends
    in the middle of a character."""

    _CONTEXT = 6

    def __init__(self, tokenizer: Tokenizer, prompt: list[int]) -> None:
        self._tokenizer = tokenizer
        self._ids = prompt[-self._CONTEXT :]
        self._prefix = 0
        self._read = len(self._ids)

    def add(self, token: int) -> str:
        self._ids.append(token)
        return self._new(final=False)

    def finish(self) -> str:
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
    """Cuts a text where one of some strings begins, also when it arrives in pieces.

    The string that is complete first counts, the longest of several that end together: so the
    result does not depend on how the text is cut into pieces.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._held = ""

    def add(self, text: str) -> tuple[str, bool]:
        """Text that can be shown now, and whether a stop string was found."""
        if not self._stops:
            return text, False
        self._held += text
        found = [(at + len(stop), at) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            return self._held[: min(found)[1]], True
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


def _decoder_kind(fast: Any) -> tuple[str, bool]:
    """`bytes`, `pieces` or `other`, and whether the first space of a text is not shown."""
    state: dict[str, Any] = json.loads(fast.decoder.__getstate__()) if fast.decoder else {}
    if state.get("type") == "ByteLevel":
        return "bytes", False
    steps: list[dict[str, Any]] = state.get("decoders", [])
    replace = {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    pieces = [replace, {"type": "ByteFallback"}, {"type": "Fuse"}]
    if steps in (pieces, [*pieces, strip]):
        return "pieces", strip in steps
    return "other", False


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
    """`{% generation %}` marks what a model is trained on; for rendering it is nothing."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's way of declaring tags

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _templates(directory: Path, config: dict[str, Any]) -> dict[str, jinja2.Template]:
    """chat_template.jinja if there is one, else what tokenizer_config.json says."""
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
    written: Any = config.get("chat_template")
    own = read_text(directory / "chat_template.jinja", CONFIG_BYTES_MAX)
    if own is not None:
        written = own
    named = written if isinstance(written, list) else [{"name": "default", "template": written}]
    try:
        return {
            one["name"]: environment.from_string(one["template"])
            for one in named
            if one["template"]
        }
    except (jinja2.TemplateError, RecursionError, *_WRONG_KIND) as error:
        what = one_line(error)
        raise TokenizerError(f"{directory}: the chat template can not be read: {what}") from error
