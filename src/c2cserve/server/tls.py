"""HTTPS, with a certificate that can be replaced while connections are open."""

import asyncio
import logging
import ssl
from collections.abc import Iterable, Iterator
from pathlib import Path

from prometheus_client.core import CounterMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

log = logging.getLogger(__name__)

_PROTOCOLS = ["http/1.1"]


class TlsError(Exception):
    """A certificate or its key cannot be used; the message is one line that says why."""


class Tls(Collector):
    """The certificate in use. New connections get the latest certificate that was read; open
    connections go on with their own."""

    def __init__(self, certificate: Path, key: Path | None) -> None:
        """Read the certificate. `key`: None if it is in the certificate's file. Raises TlsError."""
        self._certificate = certificate
        self._key = key
        self._reloads = {"ok": 0, "failed": 0}
        self._latest = self._read()
        self.context = self._read()
        """The context that the server listens with. It passes every handshake on to the latest
        context. Loading a certificate of another kind into one context would add it beside the old
        one."""
        self.context.sni_callback = self._choose

    async def hang_up(self) -> None:
        """Handle SIGHUP: read both files again. A pair that cannot be used is logged and counted;
        the certificate in use stays."""
        try:
            self._latest = await asyncio.to_thread(self._read)
        except TlsError as error:
            self._reloads["failed"] += 1
            log.error("%s; the certificate of before stays in use", error)
        else:
            self._reloads["ok"] += 1
            log.info("%s: read again", self._certificate)

    def _choose(self, connection: ssl.SSLObject, name: str | None, _: ssl.SSLContext) -> None:
        connection.context = self._latest

    def _read(self) -> ssl.SSLContext:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.set_alpn_protocols(_PROTOCOLS)
        try:
            # Without this argument, OpenSSL would ask for a password on the terminal.
            context.load_cert_chain(self._certificate, self._key, password=lambda: b"")
        except ssl.SSLError as error:
            files = f"{self._certificate}, {self._key or 'its key'}"
            reason = error.reason or "no certificate, no key, or an encrypted one"
            raise TlsError(f"{files}: {reason.replace('_', ' ').lower()}") from error
        except OSError as error:
            files = f"{self._certificate}, {self._key}" if self._key else f"{self._certificate}"
            raise TlsError(f"{files}: {error.strerror}") from error
        return context

    # ---- metrics --------------------------------------------------------------------------------

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        metric = CounterMetricFamily(
            "c2cserve:tls_reloads", "Times that the certificate was read again.", labels=["outcome"]
        )
        for outcome, count in self._reloads.items():
            metric.add_metric([outcome], count)
        yield metric
