"""The answer to an unknown model name: the error, with the name that was probably meant."""

import difflib
from collections.abc import Iterable

from c2cserve.core.model import ModelStatus
from c2cserve.server.errors import ApiError

_NAME_CHARS = 200
"""No name of the catalogue is longer."""
_COMPARED_MAX = 256
"""Names that are compared: it takes some 10 us each, on the event loop."""
_ALIKE = 0.6


def unknown_model(name: str, models: Iterable[ModelStatus]) -> ApiError:
    """Return the error for a name that no model has. It suggests the most similar name of
    `models`: those that the caller may use."""
    message = f"The model {name[:_NAME_CHARS]!r} does not exist"
    near = _nearest(name, models) if name and len(name) <= _NAME_CHARS else None
    if near is not None:
        message += f"; did you mean {near!r}?"
    return ApiError(404, message, param="model", code="model_not_found")


def _nearest(name: str, models: Iterable[ModelStatus]) -> str | None:
    names = {one.lower(): one for model in models for one in (model.id, *model.aliases)}
    # Without the organisation, which clients leave out or mistake.
    short = {_short(one): full for one, full in names.items()}
    wanted = name.lower()
    same = names.get(wanted) or short.get(_short(wanted))
    if same is not None:
        return same
    for given, known in ((wanted, names), (_short(wanted), short)):
        compared = list(known)[:_COMPARED_MAX]
        if found := difflib.get_close_matches(given, compared, n=1, cutoff=_ALIKE):
            return known[found[0]]
    return None


def _short(name: str) -> str:
    return name.rpartition("/")[2]
