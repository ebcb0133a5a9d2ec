"""What is wrong with a keys file or a field of it, in words for the person who wrote it."""

import re

import msgspec

_NAME = (
    "1 to 64 letters (A to Z, a to z), digits, '.', '_', '@' or '-', beginning with a letter or a"
    " digit"
)
_COUNT = "a whole number from 1 to 1000000000"
_TIME = "a number of milliseconds above 0, and 1000000000 at most"
_MOMENT = "a date and time with its zone, such as 2030-01-31T12:00:00+00:00"
_REQUIRED = {
    "version": "1",
    "keys": "a list of objects",
    "id": "12 hexadecimal digits in lower case",
    "name": _NAME,
    "salt": "32 hexadecimal digits in lower case",
    "sha256": "64 hexadecimal digits in lower case",
    "created": _MOMENT,
    "expires": _MOMENT,
    "revoked": _MOMENT,
    "tenant": _NAME,
    "cache_group": _NAME,
    "limits": "an object of limits",
    "requests_per_minute": _COUNT,
    "tokens_per_minute": _COUNT,
    "concurrency": _COUNT,
    "models": "a list of patterns, each of 1 to 200 characters",
    "max_priority": "a whole number from -100 to 100",
    "min_ttft_ms": _TIME,
    "min_tpot_ms": _TIME,
}
"""What each field of `keyfile` and `quota` has to be."""
_FILE = "an object with the fields 'version' and 'keys'"
_PLACE = re.compile(r" - at `\$(?P<place>.*?)(?:(?<=models)\[\d+\])?`$")
_FIELD = re.compile(
    r"Object (?P<how>missing required|contains unknown) field `(?P<name>.*?)`(?: - at `.*)?",
    re.DOTALL,
)


def requirement(field: str) -> str:
    """Return what a field has to be."""
    return _REQUIRED[field]


def field_of(error: msgspec.ValidationError) -> str:
    """Return the field that is wrong: `models` for ``$.limits.models[3]``; empty for all of it."""
    return _place(error).rpartition(".")[2]


def mistake(error: Exception) -> str:
    """Return a sentence about what msgspec found wrong with a keys file."""
    if not isinstance(error, msgspec.ValidationError):
        return "this is not JSON, or not all of it"
    place = _place(error)
    if found := _FIELD.fullmatch(str(error)):
        how = "lacks the field" if found["how"].startswith("missing") else "has an unknown field"
        return f"{place or 'the object'} {how} {found['name']!r}"
    required = _REQUIRED.get(field_of(error))
    if required is not None:
        return f"{place} is not {required}"
    return f"{place} is not an object" if place else f"this is not {_FILE}"


def _place(error: msgspec.ValidationError) -> str:
    """Return where the mistake is, as in `keys[0].limits.concurrency`; empty for all of it. A list
    of patterns is one place."""
    match = _PLACE.search(str(error))
    return "" if match is None else match["place"].removeprefix(".")
