"""A network of its own for one machine, behind a router that can stop to forward.

    this machine ── router ── namespace of the machine
         10.77.1.1 . 10.77.1.2
                     10.77.2.2 . 10.77.2.1

When the router forwards nothing, packets vanish: no connection ends, and no address goes away.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Self

import psutil

_FORWARD = "/proc/sys/net/ipv4/ip_forward"


class NoNamespaces(Exception):
    """Network namespaces cannot be made here."""


def _run(*command: str) -> None:
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    except FileNotFoundError as error:
        raise NoNamespaces(f"there is no `{command[0]}` here") from error
    if done.returncode:
        raise NoNamespaces(f"{' '.join(command)}: {done.stderr.strip()}")


class SeparateNetwork:
    """Made by `with`, as root. Raises NoNamespaces."""

    HOST = "10.77.2.1"

    def __init__(self) -> None:
        self._router, self._name = f"c2c-router-{os.getpid()}", f"c2c-{os.getpid()}"
        self._link = f"c2c{os.getpid() % 100_000}"

    def __enter__(self) -> Self:
        if os.geteuid():
            raise NoNamespaces("only root can make network namespaces")
        router, name, link = self._router, self._name, self._link
        try:
            for one in (router, name):
                _run("ip", "netns", "add", one)
            _run("ip", "link", "add", link, "type", "veth", "peer", "name", "to0", "netns", router)
            _run("ip", "link", "add", "to0", "netns", name,
                 "type", "veth", "peer", "name", "to1", "netns", router)  # fmt: skip
            _run("ip", "addr", "add", "10.77.1.1/24", "dev", link)
            _run("ip", "link", "set", link, "up")
            for port, address in (("to0", "10.77.1.2/24"), ("to1", "10.77.2.2/24")):
                _run("ip", "-n", router, "addr", "add", address, "dev", port)
                _run("ip", "-n", router, "link", "set", port, "up")
            _run("ip", "-n", router, "route", "add", "default", "via", "10.77.1.1")
            _run("ip", "-n", name, "addr", "add", f"{self.HOST}/24", "dev", "to0")
            for port in ("lo", "to0"):
                _run("ip", "-n", name, "link", "set", port, "up")
            _run("ip", "-n", name, "route", "add", "default", "via", "10.77.2.2")
            _run("ip", "route", "add", "10.77.2.0/24", "via", "10.77.1.2")
            self.mend()
        except NoNamespaces:
            self._remove()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._remove()

    def start_raylet(self, address: str) -> None:
        """Start a machine of Ray's in the namespace, which joins the cluster at `address`. Raises
        RuntimeError, and leaves nothing of it, if it does not come up."""
        ray = str(Path(sys.executable).parent / "ray")
        command = self.inside(
            ray, "start", f"--address={address}", f"--node-ip-address={self.HOST}",
            "--num-cpus=1", f"--object-store-memory={80 << 20}",
        )  # fmt: skip
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=240)
        if done.returncode:
            self.kill()
            raise RuntimeError(done.stdout + done.stderr)

    def kill(self) -> None:
        """Kill all that runs in the namespace."""
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):
                process.kill()

    def _remove(self) -> None:
        for one in (self._name, self._router):
            subprocess.run(
                ["ip", "netns", "del", one], check=False, capture_output=True, timeout=60
            )

    def _forward(self, value: int) -> None:
        _run("ip", "netns", "exec", self._router, "sh", "-c", f"echo {value} > {_FORWARD}")

    def cut(self) -> None:
        self._forward(0)

    def mend(self) -> None:
        self._forward(1)

    def inside(self, *command: str) -> list[str]:
        """Return the command that runs `command` in the namespace."""
        return ["ip", "netns", "exec", self._name, *command]

    def processes(self) -> Iterator[psutil.Process]:
        """Yield what runs in the namespace."""
        own = os.stat(Path("/run/netns") / self._name).st_ino
        for process in psutil.process_iter():
            with suppress(OSError):
                if os.stat(f"/proc/{process.pid}/ns/net").st_ino == own:
                    yield process
