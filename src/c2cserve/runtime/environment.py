"""The environment that child processes get: the server's own, without its secrets."""

import os

_PREFIX, _SUFFIXES = "C2CSERVE_", ("KEY", "KEYS")
_OTHERS = frozenset({"HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"})


def child_environment(**more: str) -> dict[str, str]:
    """Return this process's variables without keys and tokens, and with `more`.

    Workers and text processes run templates and tokenizers of checkpoints, and need no key. Every
    process of the same user can read a process's environment in /proc."""
    public = {name: value for name, value in os.environ.items() if not is_secret(name)}
    return public | more


def is_secret(name: str) -> bool:
    return name in _OTHERS or (name.startswith(_PREFIX) and name.endswith(_SUFFIXES))
