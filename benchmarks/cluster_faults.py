"""What a front's death, a head's death and a cut network do to streams; JSON on stdout.

python benchmarks/cluster_faults.py [--kind front_killed|head_killed|node_cut] [--runs N]
    [--out FILE]

As `cluster.py --part faults`, in each of N runs under 30 streams, and compared with what they say
undisturbed. `front_killed`: another front of the same nodes dies, with a stream of its own, which
is asked for again at the first one. `head_killed`: Ray's GCS is killed, and starts again with the
state that it keeps in Redis. `node_cut`: a node's network is cut for 5 s (needs root).
"""

import argparse
import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from cluster import MODELS, PROMPTS, Front, Machines, Stream, quantiles, thirty
from ray_cluster import Redis, patiently
from report import report
from separate_network import SeparateNetwork

_STREAM = (MODELS[0], f"{PROMPTS[0]} 0", 300)
"""The first of the thirty."""
_CUT_S = 5.0
"""Longer than fronts wait for a sign of life, and shorter than Ray does."""


class Fault:
    """Something that happens to a cluster again and again."""

    front: Front

    def prepare(self) -> None:
        """Do what comes before the streams."""

    def strike(self) -> None:
        raise NotImplementedError

    def mend(self) -> int:
        """Bring the cluster back. Return how many other streams said something else."""
        return 0


class FrontKilled(Fault):
    def __init__(self, machines: Machines, front: Front, folder: Path) -> None:
        self.front, self._machines, self._folder = front, machines, folder
        self._stack = ExitStack()
        self._other = front
        self._cut = Stream()

    def prepare(self) -> None:
        other = Front(
            self._machines.address, directory=self._folder / "pool", log=self._folder / "other"
        )
        self._other = self._stack.enter_context(other)
        other.wait_nodes(3)

    def strike(self) -> None:
        asyncio.run(self._kill())

    async def _kill(self) -> None:
        self._cut = Stream()
        run = asyncio.create_task(self._cut.run(self._other.url, *_STREAM))
        while len(self._cut.times_s) < 5 and not run.done():
            await asyncio.sleep(0.01)
        self._other.process.kill()
        await run

    def mend(self) -> int:
        self._stack.close()
        again = asyncio.run(Stream().run(self.front.url, *_STREAM))
        return int(bool(again.error) or not again.text.startswith(self._cut.text))


class HeadKilled(Fault):
    def __init__(self, machines: Machines, front: Front) -> None:
        self.front, self._machines = front, machines

    def strike(self) -> None:
        self._machines.stop_head_service()

    def mend(self) -> int:
        self._machines.start_head_service()
        deadline_s = time.monotonic() + 120.0
        while self.front.state()["members_age_s"] > 2.0 and time.monotonic() < deadline_s:
            time.sleep(0.2)
        return 0


class NodeCut(Fault):
    def __init__(self, network: SeparateNetwork, front: Front) -> None:
        self.front, self._network = front, network

    def strike(self) -> None:
        self._network.cut()
        time.sleep(_CUT_S)
        self._network.mend()

    def mend(self) -> int:
        self.front.wait_nodes(4, 300)
        return 0


@contextmanager
def made(kind: str, folder: Path) -> Iterator[Fault]:
    """Start a cluster to which this fault happens."""
    with ExitStack() as stack:
        redis = stack.enter_context(Redis(folder)).address if kind == "head_killed" else ""
        machines = stack.enter_context(Machines(3, joined=False, redis=redis))
        if kind == "node_cut":
            network = stack.enter_context(SeparateNetwork())
            patiently(lambda: network.start_raylet(machines.address))
        front = stack.enter_context(Front(machines.address, directory=folder / "pool"))
        front.wait_nodes(4 if kind == "node_cut" else 3, 300)
        if kind == "front_killed":
            yield FrontKilled(machines, front, folder)
        elif kind == "head_killed":
            yield HeadKilled(machines, front)
        else:
            yield NodeCut(network, front)


def disturbed(kind: str, runs: int) -> dict[str, Any]:
    failed = different = 0
    pauses_s: list[float] = []
    with tempfile.TemporaryDirectory() as name, made(kind, Path(name)) as fault:
        url = fault.front.url
        asyncio.run(thirty(url, None))
        expected = asyncio.run(thirty(url, None))
        for _ in range(runs):
            fault.prepare()
            streams = asyncio.run(thirty(url, fault.strike))
            failed += sum(bool(one.error) for one in streams)
            different += sum(
                not one.error and one.text != right.text
                for one, right in zip(streams, expected, strict=True)
            )
            pauses_s += [max(one.gaps_s, default=0.0) for one in streams]
            different += fault.mend()
            print(kind, failed, different, max(pauses_s[-30:]), os.getloadavg(), file=sys.stderr)
        lost = fault.front.state()["counters"].get("nodes_lost", 0.0)
    return {
        "runs": runs, "streams": 30 * runs, "failed": failed, "different": different,
        "nodes_lost": lost, "longest_pause_s": quantiles(pauses_s),
    }  # fmt: skip


def main() -> None:
    kinds = ("front_killed", "head_killed", "node_cut")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kind", action="append", choices=kinds)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    found: dict[str, Any] = {}
    for kind in args.kind or kinds:
        found[kind] = disturbed(kind, args.runs)
        report(found, args.out, runs=args.runs)


if __name__ == "__main__":
    main()
