"""Trying tokenizers in a process of their own, before the server loads them.

A tokenizer's file can make the library panic, abort, run for ever or take all memory. Here that
ends a child process only, and the server refuses the tokenizer. The child answers a line of JSON
with a line of JSON, and ends with its standard input.
"""

import contextlib
import json
import resource
import select
import signal
import subprocess
import sys
import threading
from pathlib import Path

from c2cserve.server.text.tokenizer import Tokenizer
from c2cserve.server.text.vocabulary import TokenizerError, Vocabulary
from c2cserve.serving.controller.probe_start import PROBES

_TRY_CPU_S = 10
"""Processor time for one tokenizer. The largest vocabularies load in two or three seconds."""
_ANSWER_S = 120
"""Wall time for one answer on a busy machine, including the start of the child."""
_MEMORY_BYTES = 8 << 30
_TEXTS = ("", "The quick brown fox, 3.14.", "na\u00efve \u4f60\u597d \U0001f680\n\t x")


class TokenizerProbe:
    """Thread-safe; one tokenizer at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None

    def check(self, directory: Path, vocab_size: int) -> None:
        """Raises TokenizerError unless a server can talk for the model with this tokenizer."""
        question = json.dumps({"directory": str(directory), "vocab_size": vocab_size})
        with self._lock:
            answer = self._ask(question)
        if answer is None:
            raise TokenizerError(
                f"{directory / 'tokenizer.json'}: trying it crashed, or took more than "
                f"{_TRY_CPU_S} s or {_MEMORY_BYTES} bytes of memory"
            )
        if answer["error"]:
            raise TokenizerError(answer["error"])

    def _ask(self, question: str) -> dict[str, str] | None:
        while (child := self._child) is None or child.poll() is not None:
            self.close()
            self._child = PROBES.take()
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            child.stdin.write(question.encode() + b"\n")
            child.stdin.flush()
        except BrokenPipeError:
            self.close()
            return None
        # The child's own timer comes first, where it can.
        answer = select.poll()  # `select` takes no descriptors from 1024 on
        answer.register(child.stdout, select.POLLIN)
        ready = answer.poll(1000 * _ANSWER_S)
        line = child.stdout.readline() if ready else b""
        if not line:
            self.close()
            return None
        return json.loads(line)

    def close(self) -> None:
        """End the child, if there is one."""
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            child.wait()
            for end in (child.stdin, child.stdout):
                if end is not None:
                    with contextlib.suppress(BrokenPipeError):
                        end.close()


def try_tokenizer(directory: Path, vocab_size: int) -> str:
    """Return why the tokenizer cannot be used; an empty string if it can."""
    try:
        tokenizer = Tokenizer(directory)
        shown = Vocabulary(tokenizer.facts)
        for text in _TEXTS:
            ids = tokenizer.encode(text)
            if ids and max(ids) >= vocab_size:
                return (
                    f"{directory / 'tokenizer.json'}: it makes token id {max(ids)} of {text!r}, "
                    f"and the model's vocabulary is {vocab_size}"
                )
            tokenizer.decode(ids)
            for token in ids:
                shown.token_text(token)
    except TokenizerError as error:
        return str(error)
    try:
        tokenizer.render([{"role": "user", "content": _TEXTS[1]}], {})
    except TokenizerError as error:  # a template may refuse this chat and take others
        if isinstance(error.__cause__, MemoryError):
            return f"{directory}: the chat template takes more than {_MEMORY_BYTES} bytes of memory"
    return ""


def main() -> None:
    """The child's loop."""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = _MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(hard, _MEMORY_BYTES)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's: the server ends this process
    for line in sys.stdin:
        question = json.loads(line)
        # Its default action ends the process, wherever it is.
        signal.setitimer(signal.ITIMER_PROF, _TRY_CPU_S)
        error = try_tokenizer(Path(question["directory"]), question["vocab_size"])
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.write(json.dumps({"error": error}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
