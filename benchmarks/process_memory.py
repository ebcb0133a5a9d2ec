"""What processes hold in memory of their own, and which processes a server has."""

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_OWN = re.compile(r"^Pss_Anon:\s+(\d+) kB", re.MULTILINE)
_FLAGS, _FORKED_NO_EXEC = 6, 0x40
"""The field `flags` of /proc/PID/stat after the name; set in it until a fork runs a program."""
_PROGRAMS = {
    b"c2cserve.server.text.process": "text process",
    b"c2cserve.serving.controller.tokenizer_probe": "tokenizer probe",
    b"c2cserve.serving.worker.process": "fork server",
}
"""An argument of a command line -> the kind of process."""


@dataclass(frozen=True, slots=True)
class OwnMemory:
    """A look at one process of a server."""

    pid: int
    kind: str
    """As `kind_of` says it."""
    bytes: int


def family(pid: int) -> list[int]:
    """The process and all that descend from it."""
    children: dict[int, list[int]] = defaultdict(list)
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text()
            except OSError:  # it has just ended
                continue
            children[int(stat.rpartition(")")[2].split()[1])].append(int(entry.name))
    found = [pid]
    for one in found:
        found += children[one]
    return found


def own_bytes(pid: int) -> int:
    """Anonymous memory of a process, and 0 once it has ended.

    A page that n processes share counts 1/n in each, so a sum over processes counts it once. A fork
    shares all pages that neither side has written to since."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    match = _OWN.search(text)
    assert match is not None, "the kernel does not split Pss"
    return int(match[1]) << 10


def kind_of(pid: int, server: int, workers: Mapping[int, str]) -> str:
    """server, text process, tokenizer probe, fork server, or worker/SLICE.

    `workers`: process ids and slices of those that are up. A worker that is not among them is just
    "worker"."""
    if pid == server:
        return "server"
    if pid in workers:
        return f"worker/{workers[pid]}"
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
        arguments = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except (FileNotFoundError, ProcessLookupError):
        return "other"
    if int(stat.rpartition(")")[2].split()[_FLAGS]) & _FORKED_NO_EXEC:
        return "worker"
    return next((kind for name, kind in _PROGRAMS.items() if name in arguments), "other")
