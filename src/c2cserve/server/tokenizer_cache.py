"""Tokenizers of the models in use, by version."""

import threading
from collections import OrderedDict
from pathlib import Path

from c2cserve.core.model import name_of
from c2cserve.runtime.gateway import ModelFiles
from c2cserve.server.tokenizer import Tokenizer


class TokenizerCache:
    """The least recently used ones beyond `limit` are dropped: a large vocabulary takes tens of MB,
    and a catalogue may hold hundreds of models."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._known: OrderedDict[str, Tokenizer] = OrderedDict()
        self._changing = threading.Lock()
        self._loading: dict[str, threading.Lock] = {}

    def get(self, files: ModelFiles) -> Tokenizer | None:
        """If it is there; never blocks for long."""
        with self._changing:
            tokenizer = self._known.get(files.key)
            if tokenizer is not None:
                self._known.move_to_end(files.key)
            return tokenizer

    def load(self, files: ModelFiles) -> Tokenizer:
        """Blocks. Many first requests at once load it once. Raises TokenizerError, and `Refused`
        when the files are not those that were checked."""
        with self._changing:
            loading = self._loading.setdefault(files.key, threading.Lock())
        with loading:
            known = self.get(files)
            if known is not None:
                return known
            files.check_tokenizer()
            tokenizer = Tokenizer(Path(files.path), files.key)
            files.check_tokenizer()
            with self._changing:
                self._known[files.key] = tokenizer
                self._known.move_to_end(files.key)
                while len(self._known) > self._limit:
                    self._known.popitem(last=False)
            return tokenizer

    def forget(self, model: str) -> None:
        """Drop every version's: the model was removed or reloaded."""
        with self._changing:
            for key in [key for key in self._loading if name_of(key) == model]:
                self._known.pop(key, None)
                del self._loading[key]
