"""One model of the catalogue, as its file (or the admin API) describes it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from c2cserve.core.request import Slo
from c2cserve.core.tensors import Dtype

DtypeChoice = Literal["auto", Dtype]


class CatalogError(ValueError):
    """A mistake in the catalogue; the message is one line and says what to do."""


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    """Exactly one of `path` (an absolute checkpoint directory) and `hub` (a repository id) is set.

    `revision` belongs to `hub`: a branch, tag or commit. `max_context` None means the checkpoint's
    own. `keep_warm_s` is a hint: how long after its last request the model should stay in the pool.
    """

    id: str
    aliases: tuple[str, ...] = ()
    path: Path | None = None
    hub: str | None = None
    revision: str = "main"
    dtype: DtypeChoice = "auto"
    slo: Slo = Slo()
    priority: int = 0
    pinned: bool = False
    max_context: int | None = None
    keep_warm_s: float = 0.0

    @property
    def names(self) -> tuple[str, ...]:
        """Everything a request may call it."""
        return (self.id, *self.aliases)
