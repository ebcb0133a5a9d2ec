"""A text process: validates, renders and tokenizes for the server, one request at a time.

Its standard input is its socket. It may take for ever, run out of memory or crash. Then the server
kills it and starts another, and only one request has failed.
"""

import os
import resource
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path

from c2cserve.processes.parent_death import end_with_parent
from c2cserve.server.doors.ollama.show import do_show
from c2cserve.server.doors.readers import READERS
from c2cserve.server.errors import ApiError, unservable
from c2cserve.server.text.messages import (
    FRAME_HEAD_BYTES,
    Api,
    FromText,
    ModelOpened,
    OpenModel,
    TextFailure,
    TextRequest,
    ToText,
    decode_to_text,
    frame,
)
from c2cserve.server.text.tokenizer import Tokenizer
from c2cserve.server.text.tokenizing import do_count, do_detokenize, do_tokenize
from c2cserve.server.text.vocabulary import TokenizerError
from c2cserve.server.text.work import do_work

_WORK: dict[Api, Callable[[TextRequest, Tokenizer | None], FromText]] = {
    **dict.fromkeys(READERS, do_work), "tokenize": do_tokenize, "detokenize": do_detokenize,
    "count_tokens": do_count, "ollama_show": do_show,
}  # fmt: skip


class _Texts:
    """The tokenizers of this process, and the work with them."""

    def __init__(self) -> None:
        self._tokenizers: dict[str, Tokenizer] = {}
        """Version of a model -> its tokenizer."""

    def answer(self, message: ToText) -> FromText:
        try:
            return self._open(message) if isinstance(message, OpenModel) else self._work(message)
        except ApiError as error:
            return TextFailure(error.status, error.message, error.param, error.code)
        except MemoryError:
            return TextFailure(400, "the request takes more memory than one may", broken=True)
        except RecursionError:
            return TextFailure(400, "the request is nested too deeply")

    def _open(self, message: OpenModel) -> ModelOpened:
        for version in message.drop:
            self._tokenizers.pop(version, None)
        loaded = {one.digest: one for one in self._tokenizers.values()}
        try:
            tokenizer = Tokenizer.load(Path(message.path), message.version, loaded)
        except TokenizerError as error:
            raise unservable(message.version, str(error)) from error
        self._tokenizers[message.version] = tokenizer
        known = tokenizer.digest in message.known
        return ModelOpened(tokenizer.digest, None if known else tokenizer.facts)

    def _work(self, message: TextRequest) -> FromText:
        target = message.target
        return _WORK[message.api](
            message, None if target is None else self._tokenizers[target.version]
        )


def _receive(end: socket.socket, size: int) -> bytes | None:
    data = bytearray(size)
    view, have = memoryview(data), 0
    while have < size:
        got = end.recv_into(view[have:])
        if not got:
            return None
        have += got
    return bytes(data)


def _set_limits(memory_bytes: int) -> None:
    """Set up the process: it dies with the server, ignores signals meant for the server, and has a
    limit of memory."""
    end_with_parent()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def main(memory_bytes: int) -> None:
    _set_limits(memory_bytes)
    end = socket.socket(fileno=os.dup(sys.stdin.fileno()))
    texts = _Texts()
    with end:
        while (head := _receive(end, FRAME_HEAD_BYTES)) is not None:
            data = _receive(end, int.from_bytes(head, "little"))
            if data is None:
                return
            answer = texts.answer(decode_to_text(data))
            end.sendall(frame(answer))


if __name__ == "__main__":
    main(int(sys.argv[1]))
