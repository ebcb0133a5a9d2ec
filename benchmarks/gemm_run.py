"""GEMMs out of far memory on a GPU, in chains: operands, steps, their time, and a check of them."""

from collections.abc import Callable
from itertools import cycle, islice, pairwise

import torch
from gemm_cases import CHAIN, Case, LinkHome
from torch import Tensor

from c2cserve.kernels.gpu.aot.repository import Repository
from c2cserve.kernels.gpu.gemm.dataflows.table import DataflowName, traffic
from c2cserve.kernels.gpu.gemm.experts import route
from c2cserve.kernels.gpu.gemm.launchers.direct import grouped
from c2cserve.kernels.gpu.gemm.launchers.staged import resident
from c2cserve.kernels.gpu.gemm.linear import launch
from c2cserve.kernels.gpu.gemm.measure import Step, WeightStore, chain_s, copy_bytes_per_s
from c2cserve.kernels.gpu.gemm.traffic import Tiles, Traffic, grouped_traffic
from c2cserve.kernels.gpu.launch_context import LaunchContext

_COPIED_BYTES = 1 << 30
_N_MAX, _K_MAX = 57344, 28672
"""Of any linear: what the output and X must hold for each row."""


class Bench:
    """A benchmark's memory: a store of weights per home, one X and one output to cut views from."""

    def __init__(
        self, repository: Repository, homes: list[LinkHome], *, store_bytes: int, rows: int
    ) -> None:
        self.context = LaunchContext(0, repository)
        self.homes = homes
        self.stores = {
            home: WeightStore(home, store_bytes, "bfloat16", 0) for home in (*homes, "hbm")
        }
        self._x = torch.empty(rows * _K_MAX, dtype=torch.bfloat16, device="cuda").normal_(std=0.25)
        self._out = torch.empty(rows * _N_MAX, dtype=torch.bfloat16, device="cuda")
        self.link_bytes_per_s = {home: self.copy_speed(home) for home in homes}

    @property
    def repository(self) -> Repository:
        return self.context.repository

    @property
    def sms(self) -> int:
        return self.context.sms

    def copy_speed(self, home: LinkHome) -> float:
        """Bytes per second of the copy engine, from that home to this GPU."""
        size = _COPIED_BYTES // 2
        return copy_bytes_per_s(
            self._out[:size], self.stores[home].tensors((size >> 12, 1 << 12))[0]
        )

    def x(self, rows: int, k: int) -> Tensor:
        return self._x[: rows * k].view(rows, k)

    def out(self, rows: int, n: int) -> Tensor:
        return self._out[: rows * n].view(rows, n)


class CaseRun:
    """A case with its weights and, for experts, where a router of no preference sends the rows:
    another way for each weight, decided on the GPU. Of cases that run at once, each has `own` X
    and output."""

    def __init__(
        self, bench: Bench, case: Case, context: LaunchContext | None = None, *, own: bool = False
    ) -> None:
        one = case.linear
        shape = (one.experts, one.n, one.k) if one.experts else (one.n, one.k)
        rows = case.m * max(1, one.top_k)
        self.case, self.context = case, context or bench.context
        self.link_bytes_per_s = bench.link_bytes_per_s[case.home]
        self.weights = bench.stores[case.home].weights(shape)
        self._far = bench.stores[case.home].tensors(shape)
        self._local = bench.stores["hbm"].tensors(shape)
        self.x, self.out = bench.x(rows, one.k), bench.out(rows, one.n)
        if own:
            self.x, self.out = self.x.clone(), torch.empty_like(self.out)
        self._offsets = [self._route() for _ in range(len(self.weights) if one.experts else 0)]
        # Read back for floors and counts, never between launches.
        self._bounds: list[list[int]] = [offsets.tolist() for offsets in self._offsets]

    def _route(self) -> Tensor:
        logits = torch.randn(self.case.m, self.case.linear.experts, device="cuda")
        return route(logits, self.case.linear.top_k, renormalize=True).offsets

    @property
    def weight_bytes(self) -> float:
        """That must cross the link: of experts only the chosen ones', a mean over the chain."""
        one = self.case.linear
        if not one.experts:
            return one.bytes
        chosen = [sum(b > a for a, b in pairwise(bounds)) for bounds in self._bounds]
        return one.bytes / one.experts * sum(chosen) / len(chosen)

    def steps(self, dataflow: DataflowName, tiles: Tiles, count: int, first: int = 0) -> list[Step]:
        """`count` GEMMs, over the weights in turn from the `first` on. `resident`: the weights of
        that shape in HBM."""

        def step(i: int) -> None:
            w = self.weights[i]
            if dataflow == "grouped":
                grouped(self.context, self.x, w, self._offsets[i], self.out, tiles)
            elif dataflow == "resident":
                self._resident(i)
            else:
                launch(self.context, dataflow, tiles, self.x, w, None, self.out)

        return self._in_turn(step, count, first)

    def seconds(self, dataflow: DataflowName, tiles: Tiles, count: int = CHAIN) -> float:
        """Of one GEMM in a chain. Raises what the launcher raises."""
        return chain_s(self.context, self.steps(dataflow, tiles, count))

    def cublas_s(self) -> tuple[float, str]:
        """W in HBM: cuBLAS; for experts the faster of torch's grouped GEMM and cuBLAS on each."""
        if not self.case.linear.experts:
            return self.seconds("resident", Tiles()), "cuBLAS"
        found = {
            "torch grouped_mm": chain_s(self.context, self._in_turn(self._grouped_mm, CHAIN)),
            "cuBLAS on each expert": chain_s(self.context, self._in_turn(self._each_expert, CHAIN)),
        }
        name = min(found, key=lambda name: found[name])
        return found[name], name

    def error(self, dataflow: DataflowName, tiles: Tiles) -> float:
        """Norm of the difference from cuBLAS over the norm, on the first weight."""
        self.out.fill_(torch.nan)
        self.steps(dataflow, tiles, 1)[0]()
        mine = self.out.clone()
        here = self._far[0].to("cuda")
        if self.case.linear.experts:
            self._multiply_each(here, self._bounds[0])
        else:
            resident(self.x, here, None, self.out)
        norm = torch.linalg.vector_norm(self.out, dtype=torch.float32)
        off = torch.linalg.vector_norm(mine.sub_(self.out), dtype=torch.float32)
        return float(off / norm)

    def traffic(self, dataflow: DataflowName, tiles: Tiles) -> Traffic:
        one = self.case.linear
        if dataflow == "grouped":
            return grouped_traffic(self._bounds[0], one.n, one.k, 2, tiles)
        return traffic(dataflow, self.case.m, one.n, one.k, 2, tiles)

    def _in_turn(self, step: Callable[[int], object], count: int, first: int = 0) -> list[Step]:
        numbers = islice(cycle(range(len(self.weights))), first, first + count)
        return [lambda i=i: step(i) for i in numbers]

    def _resident(self, i: int) -> None:
        resident(self.x, self._local[i], None, self.out)

    def _grouped_mm(self, i: int) -> Tensor:
        ends = self._offsets[i][1:]
        return torch.nn.functional.grouped_mm(self.x, self._local[i].transpose(1, 2), offs=ends)

    def _each_expert(self, i: int) -> None:
        self._multiply_each(self._local[i], self._bounds[i])

    def _multiply_each(self, weight: Tensor, bounds: list[int]) -> None:
        for expert, (start, stop) in enumerate(pairwise(bounds)):
            if stop > start:
                resident(self.x[start:stop], weight[expert], None, self.out[start:stop])
