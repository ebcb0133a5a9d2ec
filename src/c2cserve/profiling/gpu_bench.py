"""The measuring side of `c2cserve profile`: GEMMs on this machine's first GPU, timed in chains."""

import contextlib
from collections.abc import Generator
from dataclasses import replace
from functools import partial
from itertools import cycle, islice

import torch
from torch import Tensor

from c2cserve.core.tensors import Home, LinkHome
from c2cserve.devices.discover import discover
from c2cserve.devices.partitions import PartitionError
from c2cserve.kernels.gpu.aot.repository import KernelMissingError, Repository
from c2cserve.kernels.gpu.driver import MAP_BYTES, CudaError, checked, copy_async, cu
from c2cserve.kernels.gpu.gemm.choice.cost import Question
from c2cserve.kernels.gpu.gemm.choice.profile import MachineFacts
from c2cserve.kernels.gpu.gemm.dataflows.table import VARIANTS, DataflowName
from c2cserve.kernels.gpu.gemm.experts import route
from c2cserve.kernels.gpu.gemm.launchers.direct import grouped, weight_map
from c2cserve.kernels.gpu.gemm.linear import launch
from c2cserve.kernels.gpu.gemm.measure import Step, WeightStore, capture, chain_s, copy_bytes_per_s
from c2cserve.kernels.gpu.gemm.traffic import Tiles
from c2cserve.kernels.gpu.gemm.weight import ITEM_BYTES, WeightHandle
from c2cserve.kernels.gpu.launch_context import LaunchContext
from c2cserve.profiling.concurrent_slices import Slice, Streaming, beside_s, cut_slices
from c2cserve.profiling.gpu_paths import GpuPaths
from c2cserve.profiling.paths import measure_paths
from c2cserve.profiling.survey import LARGE_SLICE_SMS, SLICE_SMS, SLICES, Refused
from c2cserve.transfer.engine import LinkError
from c2cserve.transfer.path_profile import PathProfile

DEVICE, PEER = 0, 1
_DTYPE = torch.bfloat16
_STORE_BYTES = 3 << 30
_COPIED_BYTES = 512 << 20
_COPIES = 5
_WRITTEN_BYTES = 1 << 30
_CROWD_M, _CROWD_N, _CROWD_K, _CROWD_CHAIN = 16, 8192, 4096, 4
"""What a neighbour streams again and again: 256 MiB, long enough to bring it the next in time."""


class GpuBench:
    """`survey.Bench` on a GPU, with its neighbour's memory as `peer` where there is one.

    Raises `KernelMissingError` for a kernel that is not built.
    """

    def __init__(self) -> None:
        self._repository = Repository(DEVICE)
        self._repository.load(VARIANTS)
        peer = torch.cuda.device_count() > 1 and torch.cuda.can_device_access_peer(DEVICE, PEER)
        self.homes: tuple[LinkHome, ...] = ("peer", "host") if peer else ("host",)
        self._stores: dict[Home, WeightStore] = {
            home: WeightStore(home, _STORE_BYTES, "bfloat16", DEVICE, PEER)
            for home in (*self.homes, "hbm")
        }
        self._buffers: dict[str, Tensor] = {}
        self._maps: dict[tuple[int, ...], Tensor] = {}
        self._crowds: dict[Home, list[Streaming]] = {}
        self._link_bytes_per_s: dict[Home, float] = {}
        self._whole = Slice(LaunchContext(DEVICE, self._repository), torch.cuda.Stream(DEVICE))
        self.notes: list[str] = []
        # The large slice shares SMs with the small ones: they never run together.
        self._small = self._cut(SLICE_SMS, min(SLICES, self._whole.context.sms // SLICE_SMS))
        self._large = self._cut(LARGE_SLICE_SMS, 1)
        self.slices = max(1, len(self._small))
        sizes = [one.context.sms for one in (self._whole, *self._large, *self._small)]
        self.sms = list(dict.fromkeys(sizes))

    def _cut(self, sms: int, count: int) -> list[Slice]:
        if sms >= self._whole.context.sms:
            return []
        try:
            return cut_slices(self._repository, sms, count)
        except PartitionError as error:
            self.notes.append(f"slices of {sms} SMs: {error}")
            return []

    @property
    def facts(self) -> MachineFacts:
        version = int(checked("cuDriverGetVersion", cu.cuDriverGetVersion()))
        return MachineFacts(
            gpu=torch.cuda.get_device_name(DEVICE),
            sms=self._whole.context.sms,
            driver=f"CUDA {version // 1000}.{version % 1000 // 10}",
            host=discover().cpu_name,
        )

    def copies(self, home: LinkHome) -> tuple[float, float, float]:
        count = _COPIED_BYTES // ITEM_BYTES
        far, far_too = self._stores[home].tensors((count >> 12, 1 << 12))[:2]
        near, near_too = self._matrix("copied", 2, count)
        to_gpu, from_gpu = copy_bytes_per_s(near, far), copy_bytes_per_s(far_too, near)
        duplex = _at_once_bytes_per_s([(near_too, far), (far_too, near)])
        return to_gpu, from_gpu, duplex

    def paths(self, relays: bool) -> PathProfile:
        """Measure the links of all GPUs, and with `relays` paths over several of them."""
        try:
            return measure_paths(GpuPaths(), relays=relays)
        except (CudaError, KernelMissingError, LinkError, torch.OutOfMemoryError) as error:
            raise Refused(str(error)) from error

    def write_bytes_per_s(self, sms: int) -> float:
        written = self._matrix("written", 1, _WRITTEN_BYTES // ITEM_BYTES)
        own, _ = self._places(sms, 0)
        with own.use():
            return _WRITTEN_BYTES / chain_s(own.context, [lambda: written.fill_(1.0)] * 4)

    def seconds(
        self, question: Question, dataflow: DataflowName, tiles: Tiles, chain: int
    ) -> float:
        own, others = self._places(question.sms, question.neighbours)
        try:
            steps = self._steps(own.context, question, dataflow, tiles, chain)
            torch.cuda.synchronize()  # operands are there, on whatever stream they were made
            if not others:
                with own.use():
                    return chain_s(own.context, steps)
            with self._shared(question.home, [own, *others]):
                crowd = self._crowd(question.home)[: len(others)]
                return beside_s(own, capture(own.context, own.stream, steps), crowd) / chain
        except (CudaError, ValueError, torch.OutOfMemoryError) as error:
            # A candidate's own failure leaves the GPU fit for the next one; another raises here.
            torch.cuda.synchronize()
            raise Refused(str(error)) from error

    @contextlib.contextmanager
    def _shared(self, home: Home, slices: list[Slice]) -> Generator[None]:
        """Slices that stream at once hold to equal shares of the link, as they do when serving."""
        assert home != "hbm", "slices share a link"
        if home not in self._link_bytes_per_s:
            self._link_bytes_per_s[home] = self.copies(home)[0]
        _limit(slices, self._link_bytes_per_s[home] / len(slices))
        try:
            yield
        finally:
            _limit(slices, 0.0)

    def _places(self, sms: int, neighbours: int) -> tuple[Slice, list[Slice]]:
        """Where a question is measured, and who else is at work. Few CTAs without SMs of their own
        are a context that launches no more."""
        if self._small and sms == self._small[0].context.sms:
            return self._small[0], self._small[1 : 1 + neighbours]
        for own in (self._whole, *self._large):
            if sms == own.context.sms:
                return own, []
        return Slice(LaunchContext(DEVICE, self._repository, sms), self._whole.stream), []

    def _crowd(self, home: Home) -> list[Streaming]:
        """Every slice but the first, with what it streams from there."""
        if home not in self._crowds:
            m, n, k = _CROWD_M, _CROWD_N, _CROWD_K
            crowd: list[Streaming] = []
            for place, own in enumerate(self._small[1:], 1):
                question = Question(m, n, k, "bfloat16", home, own.context.sms)
                tiles = Tiles(bx=m)
                steps = self._steps(own.context, question, "direct", tiles, _CROWD_CHAIN, place)
                torch.cuda.synchronize()
                crowd.append((own, capture(own.context, own.stream, steps)))
            self._crowds[home] = crowd
        return self._crowds[home]

    def _steps(
        self, context: LaunchContext, q: Question, dataflow: DataflowName, tiles: Tiles, chain: int,
        place: int = 0,
    ) -> list[Step]:  # fmt: skip
        """GEMMs over the weights in turn. `place`: of several that run at once, so that none
        writes where another does."""
        shape = (q.experts, q.n, q.k) if q.experts else (q.n, q.k)
        weights = self._weights(q.home, shape)
        rows = q.m * max(1, q.top_k)
        x, out = self._matrix(f"x{place}", rows, q.k), self._matrix(f"out{place}", rows, q.n)
        # Another way to the experts for each weight, as a router of no preference sends rows.
        offsets = [_offsets(q) for _ in weights] if q.experts else []

        def step(i: int) -> None:
            if q.experts:
                grouped(context, x, weights[i], offsets[i], out, tiles)
            else:
                launch(context, dataflow, tiles, x, weights[i], None, out)

        return [partial(step, i) for i in islice(cycle(range(len(weights))), place, place + chain)]

    def _weights(self, home: Home, shape: tuple[int, ...]) -> list[WeightHandle]:
        """Those in HBM have their maps in memory, as where graphs of decoding read them."""
        weights = self._stores[home].weights(shape)
        if home != "hbm":
            return weights
        if shape not in self._maps:
            maps = b"".join(weight_map(w) for w in weights)
            self._maps[shape] = torch.frombuffer(bytearray(maps), dtype=torch.uint8).to(DEVICE)
        base = self._maps[shape].data_ptr()
        return [replace(w, map_pointer=base + i * MAP_BYTES) for i, w in enumerate(weights)]

    def _matrix(self, name: str, rows: int, columns: int) -> Tensor:
        """[rows, columns] of random numbers, a view of the one buffer of that name."""
        kept = self._buffers.get(name)
        if kept is None or kept.numel() < rows * columns:
            made = torch.empty(rows * columns, dtype=_DTYPE, device=f"cuda:{DEVICE}")
            kept = self._buffers[name] = made.normal_(std=0.25)
        return kept[: rows * columns].view(rows, columns)


def _limit(slices: list[Slice], bytes_per_s: float) -> None:
    for one in slices:
        with one.use():
            one.context.limit_link(bytes_per_s)


def _offsets(q: Question) -> Tensor:
    logits = torch.randn(q.m, q.experts, device=f"cuda:{DEVICE}")
    return route(logits, q.top_k, renormalize=True).offsets


def _at_once_bytes_per_s(pairs: list[tuple[Tensor, Tensor]]) -> float:
    """Copies of (target, source), each pair on a stream of its own, until the last is done."""
    streams = [torch.cuda.Stream(DEVICE) for _ in pairs]
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    begin.record(streams[0])
    moved = 0
    for stream in streams[1:]:
        stream.wait_event(begin)
    for _ in range(_COPIES):
        for stream, (target, source) in zip(streams, pairs, strict=True):
            size = source.numel() * source.element_size()
            copy_async(target.data_ptr(), source.data_ptr(), size, stream.cuda_stream)
            moved += size
    for stream in streams[1:]:
        streams[0].wait_stream(stream)
    end.record(streams[0])
    end.synchronize()
    return moved / (begin.elapsed_time(end) / 1e3)
