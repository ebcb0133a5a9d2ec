"""`python -m c2cserve.server.health_check`: what the images ask a server for its health with.

It imports nothing but the standard library: containers run it every few seconds.
"""

import ssl
import sys
import urllib.request
from pathlib import Path

_PORT = 8000
"""Where `c2cserve serve` listens if its command line does not say."""
_TIMEOUT_S = 3.0
_SERVER = Path("/proc/1/cmdline")
"""The server is a container's first process, or the last arguments of it (`docker run --init`)."""


def check(command_line: bytes) -> None:
    """Return if the server with this command line says that it is well. Raises OSError.

    `command_line`: arguments that end with NUL."""
    # Nothing between a process and its own container can be read by others, and a certificate is
    # for the name that clients use.
    unverified = ssl.create_default_context()
    unverified.check_hostname, unverified.verify_mode = False, ssl.CERT_NONE
    local = urllib.request.ProxyHandler({})
    opener = urllib.request.build_opener(local, urllib.request.HTTPSHandler(context=unverified))
    opener.open(_health_url(command_line), timeout=_TIMEOUT_S).close()


def _health_url(command_line: bytes) -> str:
    arguments = command_line.decode(errors="replace").split("\0")
    scheme, port = "http", str(_PORT)
    for argument, following in zip(arguments, [*arguments[1:], ""], strict=True):
        option, assigned, value = argument.partition("=")
        if option == "--ssl-certfile":
            scheme = "https"
        elif option == "--port":
            port = value if assigned else following
    return f"{scheme}://127.0.0.1:{port}/health"


if __name__ == "__main__":
    try:
        check(_SERVER.read_bytes())
    except OSError as error:
        sys.exit(f"the server is not well: {error}")
