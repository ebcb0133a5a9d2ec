"""What a front adds, how often requests find their model, and what faults cost; JSON on stdout.

python benchmarks/cluster.py [--part latency|throughput|catalogue|faults|decisions|load]
    [--kind KIND] [--runs N] [--out FILE]

Three nodes on this machine, as raylets of a real Ray cluster, with pools of their own. Needs the
extra `cluster`. `latency`: streams of one client, in turns through a front and to a plain server
with the same slice. `throughput`: three nodes behind a front, and three servers that get the same
requests. `catalogue`: 24 models, of which each pool holds 6, asked for by Zipf's law.
`faults`: in each of N runs under 30 streams, a worker, a node, an agent or a machine is killed, or
a node is stopped. `decisions`: what
the policy takes for a request of 1,000 simulated nodes and 10,000 models, without Ray. `load`: what
share of first tokens is in time there, at a load that 0.8 of the nodes hold, while nodes are lost.
"""

import argparse
import asyncio
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import openai
import psutil
from cluster_simulated import catalogue_requests, decisions, held_load
from report import report

ROOT = Path(__file__).parent.parent
sys.path += [str(ROOT / "tests" / one) for one in ("e2e", "cluster")]

from ray_cluster import Front, Machines, kill_group  # noqa: E402
from server_process import SPECIALISTS, ServerProcess  # noqa: E402
from streams import MODELS, PROMPTS  # noqa: E402

_TOKENS = 64
_SMALL = ("--threads", "1", "--kv-bytes", "32MiB", "--text-processes", "1")


class Stream:
    """One greedy stream: its text, and when its parts arrived."""

    def __init__(self) -> None:
        self.text = ""
        self.times_s: list[float] = []
        self.began_s = time.monotonic()
        self.error = ""

    @property
    def first_s(self) -> float:
        return self.times_s[0] - self.began_s

    @property
    def token_s(self) -> float:
        """The mean time between parts: some arrive together."""
        return (self.times_s[-1] - self.times_s[0]) / (len(self.times_s) - 1)

    @property
    def gaps_s(self) -> list[float]:
        return [b - a for a, b in zip(self.times_s, self.times_s[1:], strict=False)]

    async def run(self, url: str, model: str, prompt: str, tokens: int) -> "Stream":
        """With log-probabilities every token is shown at once. Without them, a token that is a part
        of a character waits for the rest of it, which would look like a pause."""
        async with openai.AsyncOpenAI(
            base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120.0
        ) as client:
            try:
                self.began_s = time.monotonic()
                chunks = await client.completions.create(
                    model=model, prompt=prompt, max_tokens=tokens, temperature=0, stream=True,
                    logprobs=0, extra_body={"ignore_eos": True},
                )  # fmt: skip
                async for chunk in chunks:
                    self.text += "".join(choice.text for choice in chunk.choices)
                    self.times_s.append(time.monotonic())
            except openai.APIError as error:
                self.error = str(error)
        return self


def latency(front: Front, runs: int, directory: Path) -> dict[str, Any]:
    """Compare a front with a server of the same slice, by turns so that both see the same load."""
    found: dict[str, list[Stream]] = {"front": [], "server": []}
    with ServerProcess(*_SMALL, directory=directory, slices=1) as server:
        urls = {"front": front.url, "server": server.url}
        for number in range(runs + 5):
            for name, url in urls.items():
                stream = asyncio.run(Stream().run(url, MODELS[0], f"sort: {number}", _TOKENS))
                if number >= 5:
                    found[name].append(stream)
    first_ms = {n: median(s.first_s for s in all_) * 1e3 for n, all_ in found.items()}
    token_ms = {n: median(s.token_s for s in all_) * 1e3 for n, all_ in found.items()}
    return {
        "streams": runs,
        "first_token_p50_ms": first_ms,
        "token_p50_ms": token_ms,
        "front_adds_first_token_ms": first_ms["front"] - first_ms["server"],
        "front_adds_token_ms": token_ms["front"] - token_ms["server"],
    }


async def closed_loop(
    urls: list[str], split: list[int], at_once: int, tokens: int
) -> tuple[float, list[str]]:
    """Send a request for each number in `split`, to the server of that number. Return tokens per
    second, and the slices that answered."""
    gate = asyncio.Semaphore(at_once)

    async def one(client: httpx.AsyncClient, index: int, server: int) -> str:
        body = {
            "model": MODELS[index % 4], "prompt": f"sort: {index}", "max_tokens": tokens,
            "temperature": 0, "ignore_eos": True,
        }  # fmt: skip
        async with gate:
            answer = await client.post(f"{urls[server]}/v1/completions", json=body)
        answer.raise_for_status()
        assert answer.json()["usage"]["completion_tokens"] == tokens
        return answer.headers["x-c2cserve-slice"]

    async with httpx.AsyncClient(timeout=300.0) as client:
        began_s = time.monotonic()
        slices = await asyncio.gather(*(one(client, i, to) for i, to in enumerate(split)))
        return tokens * len(split) / (time.monotonic() - began_s), list(slices)


def cpu_s(pids: Iterable[int]) -> float:
    """Return the processor time of these processes, without their children's."""
    return sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids)


def throughput(machines: Machines, front: Front, rounds: int, folder: Path) -> dict[str, Any]:
    """Compare three nodes behind a front with three servers that get the same requests as the nodes
    did. All six run at once, and are used by turns. The processor time of a token is that of
    servers: text processes and workers do the same on both sides."""
    found: dict[str, list[float]] = {"front": [], "servers": []}
    spent_s = dict.fromkeys(("front", "nodes", "servers", "membership"), 0.0)
    splits: list[list[int]] = []
    with ExitStack() as stack:
        servers = [
            stack.enter_context(ServerProcess(*_SMALL, directory=folder / f"alone{i}", slices=1))
            for i in range(3)
        ]
        urls = [one.url for one in servers]
        pids = {
            "front": [front.process.pid],
            "nodes": [one.pid for one in machines.states()],
            "servers": [one.process.pid for one in servers],
            "membership": [
                one for one in front.children()
                if b"members" in Path(f"/proc/{one}/cmdline").read_bytes()
            ],
        }  # fmt: skip
        for number in range(rounds + 1):
            began_s = {name: cpu_s(of) for name, of in pids.items()}
            rate, slices = asyncio.run(closed_loop([front.url], [0] * 120, 24, _TOKENS))
            nodes = sorted({one["id"] for one in front.state()["slices"]})
            split = [nodes.index(one) for one in slices]
            alone, _ = asyncio.run(closed_loop(urls, split, 24, _TOKENS))
            if number:  # the first round warms up
                found["front"].append(rate)
                found["servers"].append(alone)
                splits.append([split.count(i) for i in range(3)])
                for name, of in pids.items():
                    spent_s[name] += cpu_s(of) - began_s[name]
    ratios = [a / b for a, b in zip(found["front"], found["servers"], strict=True)]
    return {
        "requests": 120, "at_once": 24, "tokens": _TOKENS, "splits": splits,
        "tokens_per_s": found, "front_of_servers": ratios, "median": median(ratios),
        "cpu_us_per_token": {
            name: spent / (rounds * 120 * _TOKENS) * 1e6 for name, spent in spent_s.items()
        },
    }  # fmt: skip


def catalogue_file(folder: Path) -> Path:
    """24 models: each specialist under six names."""
    path = folder / "catalog.toml"
    path.write_text("".join(
        f'[[models]]\nid = "{MODELS[i % 4]}-{i}"\npath = "{SPECIALISTS / MODELS[i % 4]}"\n'
        for i in range(24)
    ))  # fmt: skip
    return path


async def ask(url: str, models: list[str], at_once: int) -> list[str]:
    """Return what each model says; empty for one that failed."""
    gate = asyncio.Semaphore(at_once)

    async def one(client: httpx.AsyncClient, model: str) -> str:
        body = {"model": model, "prompt": "sort: dcba", "max_tokens": 8, "temperature": 0}
        async with gate:
            answer = await client.post(f"{url}/v1/completions", json=body)
        return answer.json()["choices"][0]["text"] if answer.is_success else ""

    async with httpx.AsyncClient(timeout=300.0) as client:
        return await asyncio.gather(*(one(client, model) for model in models))


def catalogue(machines: Machines, runs: int, folder: Path) -> dict[str, Any]:
    """Count loads: a request whose model is in no pool causes one."""
    names = [f"{MODELS[i % 4]}-{i}" for i in range(24)]
    warm, counted = catalogue_requests(names, runs, 0)
    with Front(
        machines.address, directory=folder / "pool", catalog=catalogue_file(folder), pool="8MiB"
    ) as front:
        front.wait_nodes(3, 300)
        every = asyncio.run(ask(front.url, names, 4))
        asyncio.run(ask(front.url, warm, 4))
        state = front.state()
        before = state["counters"]["model_loads"]
        asked = asyncio.run(ask(front.url, counted, 4))
        loads = front.state()["counters"]["model_loads"] - before
        # The second pool that keeps it gets it from the first one.
        entry = {"id": "pinned", "path": str(SPECIALISTS / MODELS[0]), "pinned": True}
        assert front.send("POST", "/admin/models", entry) == 201
        time.sleep(5.0)
        counters = front.state()["counters"]
        machines.stop_nodes()
    return {
        "models": 24,
        "pool_bytes_of_a_node": state["pool_budget_bytes"] // 3,
        "models_bytes": sum(one["weight_bytes"] for one in state["models"]),
        "all_answered": all(every),
        "warm_up_requests": 24 + runs,
        "requests": len(asked),
        "failed": sum(not text for text in asked),
        "loads": loads,
        "found_in_a_pool": 1.0 - loads / len(asked),
        "from_other_pools": counters["fetched_models"],
        "failed_fetches": counters["failed_fetches"],
    }


def faults(machines: Machines, front: Front, runs: int, wanted: list[str] | None) -> dict[str, Any]:
    """Disturb 30 streams in each run, and compare them with what they say undisturbed."""

    def kill_agent() -> None:
        os.kill(machines.agent_pid(front.busiest(machines)), signal.SIGKILL)

    def kill_machine() -> None:
        machines.kill_machine(front.busiest(machines, headless=True))

    kinds: dict[str, Callable[[], None] | None] = {
        "undisturbed": None,
        "worker_killed": lambda: os.kill(front.busiest_worker(), signal.SIGKILL),
        "node_killed": lambda: kill_group(front.busiest(machines).pid),
        "agent_killed": kill_agent,
        "machine_killed": kill_machine,
        "node_stopped": lambda: os.killpg(front.busiest(machines).pid, signal.SIGSTOP),
    }
    asyncio.run(thirty(front.url, None))
    expected = asyncio.run(thirty(front.url, None))
    found: dict[str, Any] = {}
    for kind, disturb in kinds.items():
        if wanted and kind not in wanted:
            continue
        different = failed = 0
        pauses_s: list[float] = []
        for _ in range(runs):
            resumed = front.state()["counters"].get("resumed_requests", 0)
            streams = asyncio.run(thirty(front.url, disturb))
            failed += sum(bool(one.error) for one in streams)
            different += sum(
                not one.error and one.text != right.text
                for one, right in zip(streams, expected, strict=True)
            )
            pauses_s += [max(one.gaps_s, default=0.0) for one in streams]
            if kind == "machine_killed":
                machines.add()
            front.wait_nodes(3, 300)
            print(kind, round(max(pauses_s[-30:]), 2), front.state()["counters"].get(
                "resumed_requests", 0) - resumed, os.getloadavg()[0], file=sys.stderr)  # fmt: skip
        found[kind] = {
            "runs": runs, "streams": 30 * runs, "failed": failed, "different": different,
            "longest_pause_s": quantiles(pauses_s),
        }  # fmt: skip
    return found


def quantiles(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {
        "p50": median(ordered), "p99": ordered[int(0.99 * len(ordered))], "max": ordered[-1],
    }  # fmt: skip


async def thirty(url: str, disturb: Callable[[], None] | None) -> list[Stream]:
    streams = [Stream() for _ in range(30)]
    runs = [
        asyncio.create_task(
            one.run(url, MODELS[i % 4], f"{PROMPTS[i % 4]} {i}", 300)
        )
        for i, one in enumerate(streams)
    ]  # fmt: skip
    if disturb is not None:
        while sum(len(one.times_s) > 5 for one in streams) < 15:
            await asyncio.sleep(0.01)
        await asyncio.to_thread(disturb)
    return list(await asyncio.gather(*runs))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--part", action="append",
        choices=("latency", "throughput", "catalogue", "faults", "decisions", "load"),
    )  # fmt: skip
    parser.add_argument("--kind", action="append", help="of faults; all by default")
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    parts = args.part or ["latency", "catalogue", "faults", "decisions"]
    found: dict[str, Any] = {"decisions": decisions()} if "decisions" in parts else {}
    if "load" in parts:
        found["load"] = held_load()
    if {"latency", "throughput", "catalogue", "faults"} & {*parts}:
        found |= on_ray(parts, args.runs, args.kind)
    report(found, args.out, runs=args.runs)


def on_ray(parts: list[str], runs: int, kinds: list[str] | None) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name, Machines(3) as machines:
        folder = Path(name)
        if "catalogue" in parts:
            (folder / "many").mkdir()
            found["catalogue"] = catalogue(machines, 20 * runs, folder / "many")
            print(found, file=sys.stderr)  # the other parts take long, and may fail
        with Front(machines.address, directory=folder / "pool") as front:
            front.wait_nodes(3, 300)
            if "latency" in parts:
                found["latency"] = latency(front, 2 * runs, folder / "alone")
            if "throughput" in parts:
                found["throughput"] = throughput(machines, front, max(1, runs // 5), folder)
            if "faults" in parts:
                found["faults"] = faults(machines, front, runs, kinds)
    return found


if __name__ == "__main__":
    main()
