"""Weights of this node's pool to other nodes, and of theirs into it."""

import logging
import time
from collections import Counter
from collections.abc import Mapping
from functools import partial

from c2cserve.cluster.messages import Source
from c2cserve.cluster.weights import FetchError, Outgoing, WeightsPort, fetch
from c2cserve.kernels.crc32 import crc32
from c2cserve.memory.arrivals import Arrivals, weights_range
from c2cserve.memory.pool import Fetch
from c2cserve.runtime.gateway import Gateway, Refused
from c2cserve.serving.controller.catalog_host import CatalogHost

log = logging.getLogger(__name__)


class PoolWeights:
    """`cluster.port.NodeWeights`. Fronts say where weights are; the pool's loads ask for them."""

    def __init__(self, host: str, secret: bytes, models: CatalogHost, gateway: Gateway) -> None:
        """Raises OSError if `host` cannot be listened on."""
        self._secret = secret
        self._models = models
        self._gateway = gateway
        self._sources: dict[str, Source] = {}
        """Catalogue id -> where its next load gets it from."""
        self._counters = Counter[str](fetched_models=0, fetched_bytes=0, failed_fetches=0)
        self._port = WeightsPort(host, secret, self._find, crc32)
        models.fetch_from = self._fetch_from

    @property
    def port(self) -> int:
        return self._port.port

    @property
    def pool_changes(self) -> int:
        return self._models.pool_changes

    @property
    def counters(self) -> Mapping[str, float]:
        return {name: float(count) for name, count in self._counters.items()}

    def note(self, source: Source) -> None:
        self._sources[source.model] = source

    def close(self) -> None:
        self._port.close()

    def _find(self, model: str, fingerprint: bytes) -> Outgoing | None:
        try:
            files = self._gateway.resolve(model)
        except Refused:
            return None
        segment = None if files is None else self._models.whole(files.key, fingerprint)
        if segment is None:
            return None
        return Outgoing(segment.data.data, *weights_range(segment))

    def _fetch_from(self, model: str, fingerprint: bytes) -> Fetch | None:
        source = self._sources.pop(model, None)
        return None if source is None else partial(self._fetch, source, fingerprint)

    def _fetch(self, source: Source, fingerprint: bytes, arrivals: Arrivals) -> bool:
        began_s = time.monotonic()
        try:
            fetch(source, self._secret, fingerprint, arrivals, crc32)
        except FetchError as error:
            if not arrivals.cancelled:
                self._counters["failed_fetches"] += 1
                log.warning("%s is read from its files: %s", source.model, error)
            return False
        size, took_s = arrivals.end - arrivals.begin, time.monotonic() - began_s
        self._counters["fetched_models"] += 1
        self._counters["fetched_bytes"] += size
        log.info("%s came from %s: %d bytes in %.3f s", source.model, source.host, size, took_s)
        return True
