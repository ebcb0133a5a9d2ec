"""Options of a command that belong together, as the fields of a dataclass."""

import functools
import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, get_type_hints


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """Return `command` with a signature for typer. A parameter that is a dataclass becomes one
    option per field; the annotations of the fields describe the options."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {}
    shown: list[inspect.Parameter] = []
    for parameter in inspect.signature(command).parameters.values():
        kind = hints[parameter.name]
        if isinstance(kind, type) and is_dataclass(kind):
            groups[parameter.name] = kind
            shown += _options(kind)
        else:
            shown.append(parameter.replace(annotation=kind))

    @functools.wraps(command)
    def run(**given: Any) -> None:
        for name, kind in groups.items():
            values = {field.name: given.pop(field.name) for field in fields(kind)}
            given[name] = kind(**values)
        command(**given)

    del run.__wrapped__
    run.__dict__["__signature__"] = inspect.Signature(shown)
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in shown}
    return run


def _options(kind: Any) -> list[inspect.Parameter]:
    hints = get_type_hints(kind, include_extras=True)
    return [
        inspect.Parameter(
            field.name, inspect.Parameter.POSITIONAL_OR_KEYWORD,
            default=inspect.Parameter.empty if field.default is MISSING else field.default,
            annotation=hints[field.name],
        )
        for field in fields(kind)
    ]  # fmt: skip
