"""HTTPS, and a certificate that is exchanged under open connections."""

import shutil
import signal
import socket
import ssl
import subprocess
import urllib.request
import warnings
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
from server_process import CATALOG, ServerProcess, run_cli, wait_until

from c2cserve.server.health_check import check

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes keys")


def certify(folder: Path, name: str, kind: str) -> tuple[Path, Path]:
    """A certificate for localhost, and its key."""
    cert, key = folder / f"{name}.crt", folder / f"{name}.key"
    algorithm = {"rsa": ["rsa:2048"], "ec": ["ec", "-pkeyopt", "ec_paramgen_curve:P-256"]}[kind]
    subprocess.run(
        [
            "openssl", "req", "-x509", "-nodes", "-days", "2", "-subj", f"/CN={name}", "-addext",
            "subjectAltName=DNS:localhost,IP:127.0.0.1", "-newkey", *algorithm, "-keyout", str(key),
            "-out", str(cert),
        ],
        check=True, capture_output=True,
    )  # fmt: skip
    return cert, key


class TlsServer(ServerProcess):
    """A server of HTTPS; what this class asks it trusts the certificate in `trusted`."""

    def __init__(self, cert: Path, key: Path, directory: Path) -> None:
        files = ("--ssl-certfile", str(cert), "--ssl-keyfile", str(key))
        super().__init__(*files, directory=directory, slices=1, settled=False)
        self.url = self.url.replace("http:", "https:")
        self.cert = cert

    def get(self, path: str, timeout_s: float = 60) -> tuple[int, str]:
        context = ssl.create_default_context(cafile=str(self.cert))
        opener = urllib.request.build_opener(urllib.request.HTTPSHandler(context=context))
        with opener.open(self.url + path, timeout=timeout_s) as answer:
            return answer.status, answer.read().decode()


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TlsServer]:
    """Whatever certificate it shows at the time, `cert` is the file that it is in."""
    directory = tmp_path_factory.mktemp("tls")
    cert, key = certify(directory, "first", "rsa")
    with TlsServer(cert, key, directory / "pool") as server:
        yield server


def shown(server: TlsServer) -> bytes:
    """The certificate that a new connection is shown."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with (
        socket.create_connection(("127.0.0.1", server.port), timeout=60) as plain,
        context.wrap_socket(plain, server_hostname="localhost") as connection,
    ):
        found = connection.getpeercert(binary_form=True)
    assert found is not None
    return found


def of(path: Path) -> bytes:
    return ssl.PEM_cert_to_DER_cert(path.read_text())


def test_the_health_check_of_the_images_speaks_https(tls: TlsServer) -> None:
    told = ["c2cserve", "serve", "--ssl-certfile", str(tls.cert), "--port", str(tls.port)]
    check("\0".join([*told, ""]).encode())
    with pytest.raises(OSError, match=r"."):
        check("\0".join(told[:2] + told[4:]).encode())


def test_a_certificate_is_exchanged_while_it_serves(tls: TlsServer, tmp_path: Path) -> None:
    first, key = tls.cert, tls.cert.with_suffix(".key")
    assert shown(tls) == of(first)
    trusting_first = ssl.create_default_context(cafile=str(first))
    with (
        httpx.Client(verify=trusting_first, timeout=60) as trusting,
        httpx.Client(verify=trusting_first, base_url=tls.url, timeout=60) as kept,
        openai.OpenAI(
            base_url=f"{tls.url}/v1", api_key="none", http_client=trusting, max_retries=0
        ) as client,
    ):
        stream = client.completions.create(
            model="chatter-qwen2", prompt="hello", max_tokens=100, stream=True,
            extra_body={"ignore_eos": True},
        )  # fmt: skip
        next(iter(stream))
        assert kept.get("/health").status_code == 200
        old = of(first)
        second, other = certify(tmp_path, "second", "ec")
        shutil.copy(second, first)
        tls.signal(signal.SIGHUP)
        said = "the certificate of before stays in use"
        wait_until(lambda: said in tls.log.read_text(), 60, "half an exchange is refused")
        assert shown(tls) == old, "a certificate without its key is not taken"
        shutil.copy(other, key)
        tls.signal(signal.SIGHUP)
        wait_until(lambda: shown(tls) == of(second), 60, "the new certificate is shown")
        rest = list(stream)
        assert rest[-1].choices[0].finish_reason == "length", "what was open goes on"
        page = kept.get("/metrics").text
        assert 'c2cserve:tls_reloads_total{outcome="failed"} 1.0' in page
        assert 'c2cserve:tls_reloads_total{outcome="ok"} 1.0' in page
        assert kept.get("/health").status_code == 200, "on the connection that was open"
    assert tls.get("/health")[0] == 200


def test_neither_plain_http_nor_old_protocols(tls: TlsServer) -> None:
    with pytest.raises(httpx.HTTPError):
        httpx.get(f"http://127.0.0.1:{tls.port}/health", timeout=60)
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    # Else this client itself would offer nothing below TLS 1.2, and the server would not be asked.
    context.set_ciphers("DEFAULT:@SECLEVEL=0")
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        context.minimum_version = ssl.TLSVersion.TLSv1
        context.maximum_version = ssl.TLSVersion.TLSv1_1
    with (
        socket.create_connection(("127.0.0.1", tls.port), timeout=60) as plain,
        pytest.raises(ssl.SSLError, match=r"EOF|alert protocol version"),
    ):
        context.wrap_socket(plain)
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with (
        socket.create_connection(("127.0.0.1", tls.port), timeout=60) as plain,
        context.wrap_socket(plain) as connection,
    ):
        assert connection.version() == "TLSv1.2", "the version alone was refused"
    assert tls.get("/health")[0] == 200


def test_a_refusal_reaches_its_client(tls: TlsServer) -> None:
    context = ssl.create_default_context(cafile=str(tls.cert))
    with (
        socket.create_connection(("127.0.0.1", tls.port), timeout=60) as plain,
        context.wrap_socket(plain, server_hostname="localhost") as connection,
    ):
        connection.sendall(b"GET /health HTTP/1.1\r\nx: " + b"a" * (70 << 10))
        assert b" 431 " in connection.recv(1 << 12)


def test_a_certificate_that_is_none_is_one_line(tmp_path: Path) -> None:
    cert, key = certify(tmp_path, "one", "ec")
    _, other = certify(tmp_path, "two", "ec")
    for files, says in (
        (["--ssl-certfile", str(cert), "--ssl-keyfile", str(other)], "mismatch"),
        (["--ssl-certfile", str(tmp_path / "none"), "--ssl-keyfile", str(key)], "No such file"),
        (["--ssl-certfile", str(key)], str(key)),
        (["--ssl-keyfile", str(key)], "--ssl-certfile"),
    ):
        done = run_cli("serve", "--catalog", str(CATALOG), *files)
        assert done.returncode == 2
        assert says in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1
