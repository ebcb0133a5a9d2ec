"""A real `c2cserve serve` in a process of its own, and what it and its machine say of it."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from catalogue_files import pick, write_catalogue
from host_memory import memory_bytes
from process_memory import OwnMemory, family, kind_of, own_bytes

from c2cserve.devices.gpus import GpuProblem, find_nvml
from c2cserve.engine.gpu.requirements import usable_gpus
from c2cserve.processes.parent_death import end_with_parent

_SHOWN = 6000
_READY_S = 150.0
_POOL_ROOM_BYTES = 128 << 20
_POLL_S = 0.25
_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? ([-+0-9.eE]+|NaN|[+-]Inf)$", re.MULTILINE)


class ServerFailed(RuntimeError):
    """It ended, or did not come up in time; its last words are in the message."""


def exit_on_sigterm() -> None:
    """Have SIGTERM raise SystemExit in the main thread, so that `with` ends what it started."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))


def tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _end_with_benchmark() -> None:
    """End the server when its benchmark does, also by SIGKILL. It drains, and removes its pool."""
    end_with_parent(signal.SIGTERM)


class Server:
    """Started by `with`; ended at its end, however it comes."""

    def __init__(self, catalog: Path, log: Path, arguments: Sequence[str]) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        self.url = f"http://127.0.0.1:{port}"
        self._log = log
        self._command = [
            sys.executable, "-m", "c2cserve.cli.main", "serve", "--catalog", str(catalog),
            "--port", str(port), "--log-format", "json", *arguments,
        ]  # fmt: skip
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                self._command,
                stdout=log,
                stderr=log,
                preexec_fn=_end_with_benchmark,  # noqa: PLW1509 - there are no threads yet
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        process = self._running
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    @property
    def _running(self) -> "subprocess.Popen[bytes]":
        assert self._process is not None
        return self._process

    @property
    def pids(self) -> list[int]:
        """Of the server and all that descends from it."""
        return family(self._running.pid)

    def terminate(self) -> None:
        """Tell it to drain and end."""
        self._running.terminate()

    def wait(self, limit_s: float) -> int | None:
        """Its exit status, None if it still runs after `limit_s`."""
        try:
            return self._running.wait(limit_s)
        except subprocess.TimeoutExpired:
            return None

    def wait_ready(
        self, limit_s: float, tell: Callable[[str], None] = tell, *, all_loaded: bool = True
    ) -> None:
        """Every slice up and (`all_loaded`) every model in the pool. Raises `ServerFailed`, for a
        failed model at once."""
        began_s, told_s = time.monotonic(), time.monotonic()
        while time.monotonic() - began_s < limit_s:
            if self._running.poll() is not None:
                raise ServerFailed(f"the server ended:\n{self.last_words()}")
            try:
                state = self.state()
            except (OSError, ValueError):  # it does not listen yet
                time.sleep(_POLL_S)
                continue
            states = [model["state"] for model in state["models"]]
            if "failed" in states:
                raise ServerFailed(f"a model failed to load:\n{self.last_words()}")
            slices = [one["state"] for one in state["slices"]]
            loading = set(states) != {"ready"} if all_loaded else "ready" not in states
            if not loading and set(slices) == {"up"}:
                return
            if time.monotonic() - told_s > 5:
                told_s = time.monotonic()
                loaded = sum(model["loaded_bytes"] for model in state["models"])
                tell(f"{states.count('ready')} of {len(states)} models in the pool,"
                     f" {loaded / 1e9:.1f} GB; slices {', '.join(slices)}")  # fmt: skip
            time.sleep(_POLL_S)
        raise ServerFailed(f"not ready after {limit_s:.0f} s:\n{self.last_words()}")

    def last_words(self) -> str:
        return self._log.read_text(errors="replace")[-_SHOWN:]

    def state(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self._get("/admin/state"))
        return found

    def metrics(self) -> dict[str, float]:
        """Samples summed over their labels, buckets left out."""
        return sum_samples(self._get("/metrics"))

    def samples(self) -> dict[str, float]:
        """Every sample by its name with its labels, as `/metrics` writes them."""
        found = _SAMPLE.findall(self._get("/metrics"))
        return {f"{name}{{{labels}}}": float(value) for name, labels, value in found}

    def _get(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=10) as answer:
            return answer.read().decode()

    def kill_worker(self, slice_id: str) -> int:
        """Its process id before."""
        [pid] = [int(one["pid"]) for one in self.state()["slices"] if one["id"] == slice_id]
        os.kill(pid, signal.SIGKILL)
        return pid

    def processes(self, workers: Mapping[int, str]) -> list[OwnMemory]:
        """What each process holds of its own. `workers`: process ids and slices of those up."""
        server = self._running.pid
        return [OwnMemory(pid, kind_of(pid, server, workers), own_bytes(pid)) for pid in self.pids]

    def memory(self) -> dict[str, int]:
        """Bytes: what server and workers hold of their own (the pool is shared and not in it), and
        what GPUs have in use."""
        facts = memory_bytes()
        return {
            "own_bytes": sum(map(own_bytes, self.pids)), "shared_bytes": facts["Shmem"],
            "available_bytes": facts["MemAvailable"],
            **{f"gpu{i}_bytes": used for i, used in enumerate(gpu_used_bytes())},
        }  # fmt: skip


@contextmanager
def serving(
    catalog: Path, weight_bytes: int, folder: Path, arguments: Sequence[str], *,
    tell: Callable[[str], None] = tell, ready_s: float = _READY_S,
) -> Generator[Server]:  # fmt: skip
    """Serve a catalogue whose weights are all in the pool. Yield the server once it is ready. The
    pool and the log are in `folder`. Raises `ServerFailed`."""
    pool = ["--pool-dir", str(folder), "--pool-bytes", str(weight_bytes + _POOL_ROOM_BYTES)]
    with Server(catalog, folder / "log", [*pool, *arguments]) as server:
        server.wait_ready(ready_s, tell)
        yield server


@contextmanager
def serving_shapes(
    shapes: Sequence[str], arguments: Sequence[str], work: Path | None
) -> Generator[tuple[Server, dict[str, str]]]:
    """Serve a model of each shape, with random weights in a folder below `work` (/dev/shm). Yield
    the server and the models' names by shape. Raises `ServerFailed`."""
    with tempfile.TemporaryDirectory(dir=work or Path("/dev/shm")) as folder:
        made = pick(len(shapes), 1 << 60, 1, tuple((shape, 1) for shape in shapes))
        catalog = write_catalogue(Path(folder) / "catalogue", made)
        with serving(catalog, made.bytes, Path(folder), arguments) as server:
            yield server, {entry.shape: entry.id for entry in made.entries}


def one_slice(arena_bytes: int, *, gpu: int | None = 0, cpu_kv_bytes: int = 64 << 20) -> list[str]:
    """Return arguments of `c2cserve serve` for one slice: a whole GPU with such an arena for kept
    weights and KV, or without `gpu` a CPU slice."""
    if gpu is None:
        return ["--gpu-slices", "none", "--slices", "1", "--kv-bytes", str(cpu_kv_bytes)]
    return ["--gpu-slices", f"whole@{gpu}", "--gpu-kv-bytes", str(arena_bytes)]


def sum_samples(text: str) -> dict[str, float]:
    sums: dict[str, float] = defaultdict(float)
    for name, _, value in _SAMPLE.findall(text):
        if not name.endswith(("_bucket", "_created")):
            sums[name] += float(value)
    return dict(sums)


def gpu_used_bytes() -> list[int]:
    """Of every GPU that CUDA_VISIBLE_DEVICES shows; nothing where there is none, or no NVML."""
    return [int(memory.used) for memory in _gpu_memory()]


def gpu_total_bytes() -> list[int]:
    return [int(memory.total) for memory in _gpu_memory()]


def _gpu_memory() -> list[Any]:
    nvml = find_nvml()
    if nvml is None:
        return []
    try:
        gpus = usable_gpus()
        nvml.nvmlInit()
    except (GpuProblem, nvml.NVMLError):  # a machine without GPUs, or without their driver
        return []
    try:
        handles = [nvml.nvmlDeviceGetHandleByUUID(gpu.uuid) for gpu in gpus]
        return [nvml.nvmlDeviceGetMemoryInfo(handle) for handle in handles]
    finally:
        nvml.nvmlShutdown()
