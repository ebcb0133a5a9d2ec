"""Two workers, a GPU each: one brings bytes over the link of the other. JSON.

python benchmarks/neighbour_workers.py [--parts decoding,copies,kills] [--shape llama-8b]
    [--transfers 1000] [--kills 4] [--budget-s 45] [--out FILE]

decoding   steps of a model that is resident in the other worker, while it relays, over steps alone;
           in turns, so that both are of one time
copies     copies of the other worker's own from host memory, while it relays between them, over
           copies alone
kills      random transfers in random pieces, all of their bytes compared, while the worker that
           relays is killed in the middle of some, and replaced

`--budget-s` is the time of each part after its workers are up. The exit status is 1 if a bar is
missed.
"""

import argparse
import random
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import IO, Any, NamedTuple, Protocol

import torch
from report import report

from c2cserve.transfer.engine import LinkCounts, Ticket

PARTS = ("decoding", "copies", "kills")
_BESIDE = 1.03
"""Times of steps beside relays over times alone, at most."""
_COPIES_BESIDE = 1.02
_COPY_MIB = 256
_PHASE_S = 1.5
_PHASES = 12
_READY_S = 60.0
_PIECES_MOST = 48
_LEAST = 1 << 12
_UNTIL_KILL_S = 4e-3


class Steps(NamedTuple):
    """Some steps of the other worker."""

    begun_s: float
    ended_s: float
    step_s: float


class Phase(NamedTuple):
    relays: bool
    begun_s: float
    ended_s: float


def parse_steps(lines: Iterable[str]) -> list[Steps]:
    """Read what `relay_worker.py` writes. Other lines are left out."""
    found: list[Steps] = []
    for line in lines:
        words = line.split()
        if len(words) == len(Steps._fields):
            found.append(Steps(*map(float, words)))
    return found


def compared(steps: Sequence[Steps], phases: Sequence[Phase]) -> dict[str, Any]:
    """Return times of steps alone and beside relays: of those that are wholly within a phase.

    Raises ValueError if there are none of a kind."""
    times: dict[bool, list[float]] = {False: [], True: []}
    for phase in phases:
        times[phase.relays] += [
            one.step_s
            for one in steps
            if phase.begun_s <= one.begun_s and one.ended_s <= phase.ended_s
        ]
    if not (times[False] and times[True]):
        raise ValueError(f"{len(steps)} rounds of steps, and none in some phase: longer phases")
    alone_s, beside_s = median(times[False]), median(times[True])
    return {
        "alone_s": alone_s, "beside_s": beside_s, "worst_beside_s": max(times[True]),
        "rounds": [len(times[False]), len(times[True])], "ratio": beside_s / alone_s,
    }  # fmt: skip


def beside_relays(case: Any, work: str, detail: str, budget_s: float) -> dict[str, Any]:
    """Times of what the other worker does (`relay_worker.py`), alone and while it relays. `case`:
    `neighbour_case.Case`."""
    worker = case.start(work, detail)
    lines: list[str] = []
    assert worker.stdout is not None
    reader = threading.Thread(target=_read, args=(worker.stdout, lines), daemon=True)
    reader.start()
    until_s = time.monotonic() + _READY_S
    while not parse_steps(lines):
        if worker.poll() is not None or time.monotonic() > until_s:
            raise SystemExit("neighbour_workers: the other worker does not work")
        time.sleep(0.1)
    case.move_until_relayed()
    phases: list[Phase] = []
    before, moved, phase_s = case.relayed.relayed_bytes, 0, min(_PHASE_S, budget_s / _PHASES)
    for number in range(_PHASES):
        begun_s = time.monotonic()
        if relays := bool(number % 2):
            moved += _move_for(case, phase_s)
        else:
            time.sleep(phase_s)
        phases.append(Phase(relays, begun_s, time.monotonic()))
    relayed = case.relayed.relayed_bytes - before
    seconds = sum(phase.ended_s - phase.begun_s for phase in phases if phase.relays)
    found = compared(parse_steps(lines), phases)
    return found | {
        "gb_per_s": moved / 1e9 / seconds, "relayed_gb_per_s": relayed / 1e9 / seconds,
        "resent": case.relayed.resent, "stalls": case.relayed.stalls, work: detail,
    }  # fmt: skip


def _read(stream: IO[str], lines: list[str]) -> None:
    lines.extend(stream)


def _move_for(case: Any, seconds: float) -> int:
    """Move all bytes again and again. Return how many that were."""
    until_s, moved = time.monotonic() + seconds, 0
    tickets = [case.submit()]
    while tickets:
        if time.monotonic() < until_s:
            tickets.append(case.submit())
        case.engine.wait(tickets.pop(0), spins=False)
        moved += case.host.numel()
    return moved


# ---- kills --------------------------------------------------------------------------------------


class KillSite(Protocol):
    """A target, its source, and a relay that can be killed."""

    @property
    def size(self) -> int: ...

    def erase(self, start: int, stop: int) -> None: ...

    def submit(self, pieces: Sequence[tuple[int, int]]) -> Ticket: ...

    def wait(self, ticket: Ticket) -> None: ...

    def is_right(self, start: int, stop: int) -> bool: ...

    def counts(self) -> LinkCounts:
        """Of the relay."""
        ...

    def kill(self) -> None:
        """Kill the relay, and start another one, which is there some time later."""
        ...


def kills(
    site: KillSite, transfers: int, count: int, budget_s: float, *, seed: int = 1
) -> dict[str, Any]:
    """Transfer at least so many times, and until the relay was killed so often or time is over."""
    rng, until_s = random.Random(seed), time.monotonic() + budget_s
    killed = done = wrong = moved = 0
    seen = site.counts().relayed_bytes
    while done < transfers or (killed < count and time.monotonic() < until_s):
        start = rng.randrange(site.size // 2)
        stop = start + rng.randrange(_LEAST, site.size // 2)
        site.erase(start, stop)
        ticket = site.submit(cut(start, stop, rng))
        if killed < count and done * count >= killed * transfers:
            carried = site.counts().relayed_bytes
            if carried > seen:  # the relay that is there now carries something
                time.sleep(rng.random() * _UNTIL_KILL_S)
                site.kill()
                killed, seen = killed + 1, site.counts().relayed_bytes
        site.wait(ticket)
        wrong += not site.is_right(start, stop)
        done, moved = done + 1, moved + stop - start
    counts = site.counts()
    return {
        "transfers": done, "kills": killed, "wrong": wrong, "gb": moved / 1e9,
        "relayed_gb": counts.relayed_bytes / 1e9, "resent": counts.resent,
        "stalls": counts.stalls, "errors": counts.errors,
    }  # fmt: skip


def cut(start: int, stop: int, rng: random.Random) -> list[tuple[int, int]]:
    """Return a range in pieces of any size and alignment, in any order."""
    places = sorted({start, stop, *(rng.randrange(start, stop) for _ in range(_PIECES_MOST))})
    pieces = list(pairwise(places))
    rng.shuffle(pieces)
    return pieces


class WorkerSite:
    """A `KillSite`: two processes and two GPUs."""

    def __init__(self, case: Any) -> None:
        self._case = case
        self._worker = case.start()
        case.move_until_relayed()

    @property
    def size(self) -> int:
        return self._case.host.numel()

    def erase(self, start: int, stop: int) -> None:
        self._case.gpu[start:stop] = 0
        torch.cuda.synchronize(0)

    def submit(self, pieces: Sequence[tuple[int, int]]) -> Ticket:
        return self._case.submit_pieces(pieces)

    def wait(self, ticket: Ticket) -> None:
        if not self._case.engine.wait(ticket, 60):
            raise SystemExit("neighbour_workers: a transfer has not ended for 60 s")

    def is_right(self, start: int, stop: int) -> bool:
        there = self._case.host[start:stop].to("cuda:0")
        return torch.equal(self._case.gpu[start:stop], there)

    def counts(self) -> LinkCounts:
        return self._case.relayed

    def kill(self) -> None:
        self._worker.kill()
        self._worker = self._case.launch()


def _hold(bars: list[dict[str, Any]], what: str, value: float, limit: float, met: bool) -> None:
    bars.append({"bar": what, "value": value, "limit": limit, "met": met})
    print(f"{what}: {value:.4g} (bar {limit:g}: {'met' if met else 'MISSED'})", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", default=",".join(PARTS), help="with commas between")
    parser.add_argument("--shape", default="llama-8b", help="of the model that decodes")
    parser.add_argument("--transfers", type=int, default=1000)
    parser.add_argument("--kills", type=int, default=4)
    parser.add_argument("--budget-s", type=float, default=45.0)
    parser.add_argument("--out", type=Path, help="JSON")
    given = parser.parse_args(arguments)
    parts = given.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"unknown parts: {', '.join(sorted(unknown))}")
    if torch.cuda.device_count() < 2:
        raise SystemExit("neighbour_workers: this needs two GPUs")
    from neighbour_case import opened_case  # needs CUDA's bindings

    results: dict[str, Any] = {"gpu": torch.cuda.get_device_name(0)}
    bars: list[dict[str, Any]] = []
    run: dict[str, Callable[[Any], dict[str, Any]]] = {
        "decoding": lambda case: beside_relays(case, "decode", given.shape, given.budget_s),
        "copies": lambda case: beside_relays(case, "copies", str(_COPY_MIB), given.budget_s),
        "kills": lambda case: kills(WorkerSite(case), given.transfers, given.kills, given.budget_s),
    }
    for part in parts:
        begun_s = time.perf_counter()
        with opened_case() as case:
            results[part] = run[part](case) | {"wall_s": time.perf_counter() - begun_s}
    if (found := results.get("decoding")) is not None:
        ratio = found["ratio"]
        _hold(bars, "steps beside relays to steps alone", ratio, _BESIDE, ratio <= _BESIDE)
    if (found := results.get("copies")) is not None:
        ratio = found["ratio"]
        _hold(bars, "own copies beside relays to copies alone", ratio, _COPIES_BESIDE,
              ratio <= _COPIES_BESIDE)  # fmt: skip
    if (found := results.get("kills")) is not None:
        right = found["wrong"] == 0 and found["transfers"] >= given.transfers
        _hold(bars, "transfers with wrong bytes", found["wrong"], 0, right)
        _hold(bars, "kills", found["kills"], given.kills, found["kills"] >= given.kills)
    report(results | {"bars": bars}, given.out, parts=given.parts, shape=given.shape)
    if not all(bar["met"] for bar in bars):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
