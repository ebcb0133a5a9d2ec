"""Changes of the catalogue while it is served, at fronts and nodes alike.

Each keeps the last change of each model. When two connect, they give each other theirs, and the
newer one of each model stays. So all come to the same catalogue, also those that were away. Of
changes with one number, the one of the front with the later name stays.
"""

from collections.abc import Mapping
from typing import Any

from c2cserve.cluster.messages import ModelChange


class ModelChanges:
    """The last change of each model, by its catalogue id."""

    def __init__(self) -> None:
        self.last: dict[str, ModelChange] = {}

    def make(
        self, front: str, model: str, entry: dict[str, Any] | None, *, reload: bool = False
    ) -> ModelChange:
        """Return a change that is newer than all that are known here, after noting it."""
        number = 1 + max((one.number for one in self.last.values()), default=0)
        change = self.last[model] = ModelChange(number, front, entry, reload)
        return change

    def newer(self, changes: Mapping[str, ModelChange]) -> dict[str, ModelChange]:
        """Take over the changes that are newer than those known here, and return them."""
        found = {
            model: one for model, one in changes.items()
            if model not in self.last or _stamp(one) > _stamp(self.last[model])
        }  # fmt: skip
        self.last.update(found)
        return found


def _stamp(change: ModelChange) -> tuple[int, str]:
    return change.number, change.front


def unpinned(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return a catalogue entry as nodes get it: fronts choose the nodes that keep a model."""
    return {name: given for name, given in entry.items() if name != "pinned"}
