"""HTTPS: a certificate that is exchanged while connections are open."""

import ssl
from pathlib import Path

_PROTOCOLS = ["http/1.1"]


class TlsError(Exception):
    """A certificate or its key cannot be used; the message is one line that says why."""


class Tls:
    """The certificate in use. New connections get the latest one that was read; those that are
    open go on with theirs."""

    def __init__(self, certificate: Path, key: Path | None) -> None:
        """`key`: None if it is in the certificate's file. Raises TlsError."""
        self._certificate = certificate
        self._key = key
        self._latest = self._read()
        self.context = self._read()
        """What the server listens with. It hands every handshake to the latest context: a
        certificate of another kind than the one before would otherwise stand beside it."""
        self.context.sni_callback = self._choose

    def reload(self) -> None:
        """Read both files again. Raises TlsError; the certificate in use stays."""
        self._latest = self._read()

    def _choose(self, connection: ssl.SSLObject, name: str | None, _: ssl.SSLContext) -> None:
        connection.context = self._latest

    def _read(self) -> ssl.SSLContext:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.set_alpn_protocols(_PROTOCOLS)
        try:
            # Without a password, OpenSSL would ask for one on the terminal.
            context.load_cert_chain(self._certificate, self._key, password=lambda: b"")
        except ssl.SSLError as error:
            files = f"{self._certificate}, {self._key or 'its key'}"
            reason = error.reason or "no certificate, no key, or an encrypted one"
            raise TlsError(f"{files}: {reason.replace('_', ' ').lower()}") from error
        except OSError as error:
            files = f"{self._certificate}, {self._key}" if self._key else f"{self._certificate}"
            raise TlsError(f"{files}: {error.strerror}") from error
        return context
