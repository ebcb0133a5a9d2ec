"""Tokenizers of the models in use."""

import threading
from collections import OrderedDict
from pathlib import Path

from c2cserve.runtime.gateway import ModelFiles
from c2cserve.server.tokenizer import Tokenizer


class TokenizerCache:
    """The least recently used ones beyond `limit` are dropped: a large vocabulary takes tens of MB,
    and a catalogue may hold hundreds of models."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._known: OrderedDict[str, tuple[str, Tokenizer]] = OrderedDict()
        self._changing = threading.Lock()
        self._loading: dict[str, threading.Lock] = {}

    def get(self, files: ModelFiles) -> Tokenizer | None:
        """If it is there; never blocks for long."""
        with self._changing:
            path, tokenizer = self._known.get(files.id, ("", None))
            if tokenizer is None or path != files.path:
                return None
            self._known.move_to_end(files.id)
            return tokenizer

    def load(self, files: ModelFiles) -> Tokenizer:
        """Blocks. Many first requests at once load it once. Raises TokenizerError."""
        with self._changing:
            loading = self._loading.setdefault(files.id, threading.Lock())
        with loading:
            known = self.get(files)
            if known is not None:
                return known
            tokenizer = Tokenizer(Path(files.path), files.id)
            with self._changing:
                self._known[files.id] = (files.path, tokenizer)
                self._known.move_to_end(files.id)
                while len(self._known) > self._limit:
                    self._known.popitem(last=False)
            return tokenizer

    def forget(self, model: str) -> None:
        with self._changing:
            self._known.pop(model, None)
            self._loading.pop(model, None)
