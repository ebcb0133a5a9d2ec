"""A vocabulary as bytes, in a file: text processes write it, workers match grammars with it.

A worker has no tokenizer: loading one takes seconds, and its files may have changed since the model
was loaded. A text process has one, which was checked. The file is named by its contents, so models
with one vocabulary share it. It lies beside the segments of the run and goes with them.
"""

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[bytes]).decode


def write_table(prefix: str, tokens: Sequence[bytes]) -> str:
    """Write the bytes of each token, by its id, unless such a file is there. Bytes are empty for
    tokens that add no text. `prefix`: the beginning of the file's path. Return the path. Raises
    OSError."""
    data = _encode(tokens)
    path = Path(f"{prefix}.{hashlib.blake2b(data, digest_size=12).hexdigest()}.tokens")
    if not path.exists():
        partial = Path(f"{path}.{os.getpid()}")
        partial.write_bytes(data)
        partial.rename(path)  # never half a table under the final name
    return str(path)


def read_table(path: str) -> list[bytes]:
    """Return what `write_table` wrote. Raises OSError and msgspec.MsgspecError."""
    return _decode(Path(path).read_bytes())
