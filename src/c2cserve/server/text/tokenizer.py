"""A model's tokenizer and chat template, without the model's framework."""

import copy
import hashlib
import json
from array import array
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as FastTokenizer
from tokenizers.models import WordLevel

from c2cserve.core.request import BLOCK_TOKENS
from c2cserve.files.reading import TOKENIZER_BYTES_MAX, FileProblem, read_text
from c2cserve.server.text.templates import ChatTemplate
from c2cserve.server.text.vocabulary import TokenizerError, Vocabulary, VocabularyFacts, refusal
from c2cserve.server.tools.reading import ARGUMENTS_MARK, CALLS_MARK, CallFormat

_NORMALIZED = 3
"""Largest factor by which a normal form (NFC) makes a text shorter, in bytes of UTF-8."""


class Tokenizer(Vocabulary):
    """A vocabulary that can also turn text into tokens. Thread-safe."""

    def __init__(self, directory: Path, model: str = "") -> None:
        """Load the tokenizer of a checkpoint. `model` salts the prefix hashes. Raises
        TokenizerError."""
        self._read(directory, model, _file_of(directory))

    def _read(self, directory: Path, model: str, text: str) -> None:
        """Load what the tokenizer's file says. Raises TokenizerError."""
        self._belong_to(directory, model)
        try:
            self._fast: Any = FastTokenizer.from_str(text)
            # A prompt is never truncated or padded in silence, whatever the file asks for.
            self._fast.no_truncation()
            self._fast.no_padding()
        except BaseException as error:
            raise refusal(error, str(directory / "tokenizer.json")) from error
        self.facts = self._read_facts()
        """What the server needs to show tokens."""
        super().__init__(self.facts, _digest(text))
        self._decoder = self._fast
        self.token_bytes_max = self._token_bytes_max()
        self._table: list[bytes] = []

    @classmethod
    def load(cls, directory: Path, model: str, loaded: Mapping[str, "Tokenizer"]) -> "Tokenizer":
        """Return the tokenizer of a checkpoint. A file that is `loaded` (digest -> tokenizer) is
        not loaded again. It takes up to a second and 100 MB, and models of one family have it in
        common. Raises TokenizerError."""
        text = _file_of(directory)
        same = loaded.get(_digest(text))
        if same is None:
            tokenizer = cls.__new__(cls)
            tokenizer._read(directory, model, text)
        else:
            tokenizer = copy.copy(same)
            tokenizer._belong_to(directory, model)
        return tokenizer

    def _belong_to(self, directory: Path, model: str) -> None:
        """Set what differs between models with equal files."""
        self.directory = directory
        self._showing = {}  # views are of this model
        self._salt = hashlib.blake2b(model.encode(), digest_size=16).digest()
        try:
            self._template = ChatTemplate(directory)
        except FileProblem as problem:
            raise TokenizerError(str(problem)) from problem

    def _read_facts(self) -> VocabularyFacts:
        vocab: dict[str, int] = self._fast.get_vocab(with_added_tokens=True)
        added: dict[int, Any] = self._fast.get_added_tokens_decoder()
        kind, strips = _decoder_kind(_state(self._fast.decoder))
        return VocabularyFacts(
            kind, strips, {number: piece for piece, number in vocab.items()},
            [number for number, one in added.items() if one.special],
            self._decoder_only(vocab) if kind == "other" else "",
        )  # fmt: skip

    def _decoder_only(self, vocab: dict[str, int]) -> str:
        """Return a tokenizer that only decodes, as JSON. It has no merges, which take long to
        load."""
        words = FastTokenizer(WordLevel(vocab, next(iter(vocab), "")))
        words.decoder = self._fast.decoder
        for token in self._fast.get_added_tokens_decoder().values():
            (words.add_special_tokens if token.special else words.add_tokens)([token])
        return words.to_str()

    def _token_bytes_max(self) -> int | None:
        """Return the most bytes of text that one token stands for; None if there is no bound. Some
        tokenizers write any run of unknown characters, or of spaces, as one token."""
        normalizers = _steps(self._fast.normalizer, "normalizers")
        readers = _steps(self._fast.pre_tokenizer, "pretokenizers")
        spelled = {
            "bytes": any(one["type"] == "ByteLevel" for one in readers),
            "pieces": bool(getattr(self._fast.model, "byte_fallback", False)),
        }.get(self.kind, False)
        added = self._fast.get_added_tokens_decoder().values()
        if (
            not spelled
            or not all(map(_grows, normalizers))
            or any(one.lstrip or one.rstrip for one in added)
        ):
            return None
        normalized = any(one["type"] == "NFC" for one in normalizers)
        return self._longest_spelled() * (_NORMALIZED if normalized else 1)

    def _longest_spelled(self) -> int:
        """Return the most bytes of a token. A piece never has fewer bytes than what it spells, and
        counting them is quick: only those that might be the longest are spelled."""
        longest = 1
        for token, piece in self._pieces.items():
            if len(piece.encode()) > longest:
                longest = max(longest, len(self._spelled(token)))
        return longest

    # ---- text to tokens -------------------------------------------------------------------------

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Return the tokens of a text. `special`: add the tokenizer's own around it (BOS). Raises
        TokenizerError."""
        try:
            # This call keeps no offsets, and takes a third of the time.
            (encoding,) = self._fast.encode_batch_fast([text], add_special_tokens=special)
        except BaseException as error:
            raise refusal(error, "the tokenizer cannot take this text") from error
        return encoding.ids

    @property
    def call_format(self) -> CallFormat | None:
        """The format in which the model's template asks for calls of tools, None if unknown."""
        return self._template.call_format

    @property
    def template_source(self) -> str:
        """The model's chat template, empty if it has none."""
        return self._template.source

    @property
    def thinks(self) -> bool:
        """Whether the model's template or vocabulary knows `<think>`."""
        known = self._fast.token_to_id("<think>") is not None
        return known or "<think>" in self._template.source

    def marks(self, form: CallFormat) -> dict[str, int]:
        """Return the special tokens of calls in a format, as far as the vocabulary has them."""
        used = {"mistral": (CALLS_MARK,), "mistral_args": (CALLS_MARK, ARGUMENTS_MARK)}
        ids = {mark: self._fast.token_to_id(mark) for mark in used.get(form, ())}
        return {mark: token for mark, token in ids.items() if token is not None}

    def table(self, size: int) -> list[bytes]:
        """Return the bytes that each of the first tokens adds to a text, empty for special tokens
        and ids without a token. Only for kinds where that is fixed (not `other`)."""
        if len(self._table) != size:
            bytes_of = (self.byte(token) for token in range(size))
            self._table = [
                self.raw(token) if byte is None else bytes([byte])
                for token, byte in enumerate(bytes_of)
            ]
        return self._table

    def pieces(self, tokens: list[int]) -> list[str]:
        """Return the tokens as the vocabulary spells them; empty for ids without a token."""
        return [self._pieces.get(token, "") for token in tokens]

    def render(
        self, messages: list[dict[str, Any]], extra: dict[str, Any], chars_max: int | None = None,
        *, prompted: bool = True,
    ) -> str:  # fmt: skip
        """Return the chat as the model's template writes it. `prompted`: with the beginning of the
        answer. Raises TokenizerError."""
        return self._template.render(messages, extra, chars_max, prompted=prompted)

    def prefix_hashes(self, tokens: list[int], salt: bytes = b"") -> tuple[int, ...]:
        """Return a chained 64-bit hash per full block. Hashes are equal for equal prefixes of the
        same model and `salt` (server/access/cache_salts.py), and for nothing else."""
        data = array("I", tokens).tobytes()
        size, digest = BLOCK_TOKENS * 4, hashlib.blake2b(self._salt + salt, digest_size=16).digest()
        hashes: list[int] = []
        for start in range(0, len(data) - size + 1, size):
            digest = hashlib.blake2b(digest + data[start : start + size], digest_size=16).digest()
            hashes.append(int.from_bytes(digest[:8], "little"))
        return tuple(hashes)


def _file_of(directory: Path) -> str:
    path = directory / "tokenizer.json"
    try:
        text = read_text(path, TOKENIZER_BYTES_MAX)
    except FileProblem as problem:
        raise TokenizerError(str(problem)) from problem
    if text is None:
        raise TokenizerError(
            f"{path}: no such file; save the tokenizer in the fast format "
            "(AutoTokenizer.from_pretrained(...).save_pretrained(...))"
        )
    return text


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _state(part: Any) -> dict[str, Any]:
    """Return a part of a tokenizer as its file writes it."""
    return json.loads(part.__getstate__()) if part else {}


def _steps(part: Any, name: str) -> list[dict[str, Any]]:
    """Return the steps of a part, which is one step, a sequence of steps or nothing."""
    found = _state(part)
    if found.get("type") == "Sequence":
        return list(found.get(name) or ())
    return [found] if found else []


def _grows(normalizer: dict[str, Any]) -> bool:
    """Return whether a step never makes a text shorter, or (NFC) only by a bounded factor."""
    if normalizer["type"] != "Replace":
        return normalizer["type"] in ("NFC", "Prepend")
    pattern = normalizer["pattern"].get("String")
    return pattern is not None and len(normalizer["content"].encode()) >= len(pattern.encode())


def _decoder_kind(decoder: dict[str, Any]) -> tuple[str, bool]:
    """`bytes`, `pieces` or `other`, and whether the first space of a text is not shown."""
    if decoder.get("type") == "ByteLevel":
        return "bytes", False
    steps: list[dict[str, Any]] = decoder.get("decoders", [])
    replace = {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    pieces = [replace, {"type": "ByteFallback"}, {"type": "Fuse"}]
    if steps in (pieces, [*pieces, strip]):
        return "pieces", strip in steps
    return "other", False
