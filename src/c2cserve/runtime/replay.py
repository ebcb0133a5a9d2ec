"""Replaying a record: the same events through the same policies must give the same actions."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from c2cserve.core.actions import BaselineClusterAction, BaselineSliceAction
from c2cserve.core.machine import Slice
from c2cserve.core.policy_names import OWN
from c2cserve.policy.by_name import cluster_policy, slice_policy
from c2cserve.policy.cluster.admission import AdmissionSettings
from c2cserve.policy.cluster.policy import ClusterPolicy
from c2cserve.policy.fleet.placement import FleetSettings
from c2cserve.policy.fleet.policy import FleetPolicy
from c2cserve.policy.slice.policy import SlicePolicy
from c2cserve.runtime.record import VERSION
from c2cserve.runtime.wire import WireError, plain, untagged

SIMULATED = "simulated"
"""The policies of a simulation's record begin with this: a preset made them."""


class RecordError(ValueError):
    """The file is not a record this version can replay."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The first tick of a stream that decided otherwise."""

    tick: int
    now: float
    recorded: list[Any]
    replayed: list[Any]


@dataclass(slots=True)
class StreamResult:
    stream: str
    ticks: int = 0
    events: int = 0
    actions: int = 0
    difference: Difference | None = None


@dataclass(frozen=True, slots=True)
class ReplayResult:
    streams: tuple[StreamResult, ...]
    torn_line: bool
    """Whether a stream's last line is incomplete, because its writer was killed. It is left out."""

    @property
    def equal(self) -> bool:
        return all(stream.difference is None for stream in self.streams)


def _cluster(arguments: dict[str, Any]) -> ClusterPolicy[BaselineClusterAction]:
    settings = msgspec.convert(arguments["settings"], AdmissionSettings)
    return cluster_policy(arguments.get("policy", OWN), settings)


def _slice(arguments: dict[str, Any]) -> SlicePolicy[BaselineSliceAction]:
    slice_ = msgspec.convert(arguments["slice"], Slice)
    return slice_policy(arguments.get("policy", OWN), slice_, arguments["max_in_flight"])


def _fleet(arguments: dict[str, Any]) -> FleetPolicy:
    return FleetPolicy(msgspec.convert(arguments["settings"], FleetSettings))


_POLICIES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "cluster": _cluster, "fleet": _fleet, "slice": _slice,
}  # fmt: skip


class _ReplayedStream:
    def __init__(self, header: dict[str, Any]) -> None:
        if str(header.get("policy")).startswith(SIMULATED):
            raise RecordError("a simulation's record: only replay --dashboard shows it")
        if header.get("v") != VERSION or header.get("policy") not in _POLICIES:
            raise RecordError(f"stream {header.get('stream')}: written by another version")
        self._policy = _POLICIES[header["policy"]](header["arguments"])
        self.result = StreamResult(header["stream"])

    def tick(self, line: dict[str, Any]) -> None:
        result = self.result
        if result.difference is not None:
            return  # its state differs from here on
        events = untagged(line["events"])
        for event in events:
            self._policy.apply(event)
        actions = plain(self._policy.decide(line["now"]))
        result.ticks += 1
        result.events += len(events)
        result.actions += len(actions)
        if actions != line["actions"]:
            result.difference = Difference(result.ticks, line["now"], line["actions"], actions)


def replay(path: Path) -> ReplayResult:
    """Feed a record to its policies. Raises RecordError or OSError."""
    streams: dict[str, _ReplayedStream] = {}
    lines = RecordLines(path)
    for number, line in lines:
        try:
            if "policy" in line:
                streams[line["stream"]] = _ReplayedStream(line)
            else:
                streams[line["stream"]].tick(line)
        except (KeyError, TypeError, WireError, msgspec.ValidationError) as error:
            raise RecordError(f"{path}:{number}: not a line of a record: {error!r}") from error
    if not streams:
        raise RecordError(f"{path}: not a record (no header line)")
    return ReplayResult(tuple(stream.result for stream in streams.values()), lines.torn)


_LINE_START = b'{"stream":'


class RecordLines:
    """Yields number and content of each whole line. Iterating raises RecordError, OSError."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.torn = False

    def __iter__(self) -> Iterator[tuple[int, dict[str, Any]]]:
        with self._path.open("rb") as file:
            for number, raw in enumerate(file, 1):
                # A process that was killed while it wrote leaves the beginning of a line, and the
                # next line of another process follows it at once.
                start = raw.rfind(_LINE_START)
                self.torn |= start > 0 or not raw.endswith(b"\n")
                if not raw.endswith(b"\n"):
                    return
                try:
                    yield number, msgspec.json.decode(raw[max(0, start) :], type=dict[str, Any])
                except msgspec.DecodeError as error:
                    raise RecordError(f"{self._path}:{number}: {error}") from error
