"""What a node is told when it starts: the settings of its server, and its catalogue, as JSON.

The front that first meets a machine says it. So all nodes serve one catalogue, and only checkpoints
must be there, at the paths that the catalogue names.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from c2cserve.catalog.file import Catalog
from c2cserve.catalog.parse import parse_entry
from c2cserve.cluster.catalogue import unpinned
from c2cserve.server.settings import ServerSettings
from c2cserve.serving.live_server import LiveSettings


@dataclass(frozen=True, slots=True)
class NodeSpec:
    settings: LiveSettings
    models: Sequence[dict[str, Any]]
    base_dir: Path

    def catalog(self) -> Catalog:
        """Return the catalogue. Raises CatalogError."""
        entries = tuple(parse_entry(one, self.base_dir) for one in self.models)
        return Catalog(entries, tuple(self.models), self.base_dir)


def node_spec(settings: LiveSettings, catalog: Catalog) -> bytes:
    """Return the JSON for nodes beside a front with these settings. Keys, certificates and logs of
    use are the fronts' alone. So is what is pinned: fronts choose the nodes that keep it."""
    own = replace(settings, server=ServerSettings(), keys_file=None, usage_log=None, record=None)
    spec = NodeSpec(own, [unpinned(one) for one in catalog.raw], catalog.base_dir)
    return msgspec.json.encode(spec, enc_hook=str)


def read_spec(data: bytes | msgspec.Raw) -> NodeSpec:
    """Raises msgspec.MsgspecError for what another version has written."""
    return msgspec.json.decode(data, type=NodeSpec, dec_hook=_as_type)


def _as_type(kind: type[Any], given: Any) -> Any:
    if kind is Path:
        return Path(given)
    raise TypeError(f"{kind} is no part of a specification")
