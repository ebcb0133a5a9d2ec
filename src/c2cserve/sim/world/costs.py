"""The cost of a step on a slice: seconds that no link can shorten, and bytes over the link.

Roofline where nothing is measured:

    compute = (2 * active parameters * tokens + attention) / flops
    memory  = (weights cached in the slice's memory + KV read and written + activations) / bandwidth
    floor   = max(compute, memory) + fixed cost

Attention takes 4 * layers * heads * head_dim FLOP for every pair of a token and one before it.
Weights that are not cached stream meanwhile. The step ends when the floor is over and all weights
have arrived. Our own dataflows read them once, whatever the number of tokens (docs/kernels.md).

C2CServe's hybrid GEMMs do a share alpha of their columns output-stationary, which reads weights
again for every 128 tokens. The rest is weight-stationary, which reads and writes 16-bit partial
sums in memory once for every 128 of the inner dimension:

    link   = weights * (alpha * ceil(tokens / 128) + 1 - alpha)
    memory + (1 - alpha) * 4 * tokens * active parameters / 128

This is their section 5, within 10 % of the times of both prototypes on an H200.

Where a GPU's kernels were measured, their times replace the roofline of dense models
(`sim.world.tables`), but for hybrid GEMMs. A table of the model, measured on the device, replaces
both.
"""

from dataclasses import dataclass
from math import ceil, exp, log, sqrt
from random import Random

from c2cserve.core.step import Step
from c2cserve.core.value import value
from c2cserve.sim.world.hardware import SimulatedSlice
from c2cserve.sim.world.shapes import SimModel
from c2cserve.sim.world.tables import KernelTimes, PowerLimit, StepTable, Tables

_MAGIC = 4.0 * exp(-0.5) / sqrt(2.0)
"""A factor of the ratio method for normal numbers."""
_TILE = 128
_WAITS = 1.25
"""GEMMs that take so many times as long as reading their weights wait for arithmetic."""
_ACTIVATION_FACTOR = 24
"""Bytes that the activations of one token move in memory per layer, in units of the hidden size.
They are inputs and outputs of seven GEMMs and of the norms between them, 16 bit."""


@value
class StepCost:
    floor_s: float
    link_bytes: float
    """Bytes of weights that are not cached."""
    compute_share: float
    """Share of the floor that compute sets; memory sets the rest. In measured tables: prefills."""
    memory_bytes: float = 0.0
    """Bytes read and written in the slice's own memory, by the roofline."""
    arithmetic_s: float = 0.0
    """Seconds of the floor whose kernels wait for arithmetic alone, where kernels were measured."""


@dataclass(frozen=True, slots=True)
class _Terms:
    """A model on a simulated slice, with all constant divisions done."""

    token_s: float
    pair_s: float
    """Attention of a token with one before it."""
    activation_s: float
    kv_token_s: float
    """Time to read or write the KV of one token."""
    byte_s: float
    partial_token_s: float
    """Time for the partial sums of weight-stationary GEMMs, of one token."""
    fixed_s: float
    table: StepTable | None
    kernels: KernelTimes | None
    """Those of the slice, if they hold for the model."""
    row_s: float
    """GEMMs of its layers for one row, by these."""
    layers: int
    output_bytes: float
    """Weights of the output's GEMM."""
    kv_layer_bytes: float
    """Keys and values of a token in one layer."""
    pair_flop: float
    """Attention of a token with one before it, in one layer."""


class Clock:
    """The clock of one GPU under its power limit."""

    def __init__(self, limit: PowerLimit) -> None:
        self._limit = limit
        self._fallen = 0.0
        """How far it had fallen at `_since_s`, as a share of the way."""
        self._since_s = 0.0

    def lasting_s(self, now: float, floor_s: float, arithmetic_s: float) -> float:
        """Return the seconds of a step that begins now, of those that it takes at the full clock.

        `arithmetic_s`: those of them in which it waits for arithmetic, more than none."""
        limit = self._limit
        settle_s = limit.settle_s
        risen = 1.0 - self._fallen * exp(-max(0.0, now - self._since_s) / settle_s)
        left = exp(-floor_s / settle_s)
        fallen = 1.0 - risen * settle_s / floor_s * (1.0 - left)
        took_s = floor_s + (limit.sustained - 1.0) * fallen * arithmetic_s
        self._fallen, self._since_s = 1.0 - risen * left, now + took_s
        return took_s


class Costs:
    """Costs of steps. The `SimulatedSlice` sets the speed, the `SimModel` the amount."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        self._terms: dict[tuple[str, str], _Terms] = {}
        self._clocks: dict[str, Clock] = {}

    def lasting_s(self, cost: StepCost, simulated: SimulatedSlice, now: float) -> float:
        """Return the floor of a step that begins now, at the clock that the slice's GPU has."""
        if simulated.kernels is None or cost.arithmetic_s <= 0.0:
            return cost.floor_s
        clock = self._clocks.get(simulated.slice.id)
        if clock is None:
            clock = self._clocks[simulated.slice.id] = Clock(simulated.kernels.power)
        return clock.lasting_s(now, cost.floor_s, cost.arithmetic_s)

    def step(
        self,
        step: Step,
        model: SimModel,
        simulated: SimulatedSlice,
        cached: float,
        alpha: float | None = None,
        extra_tokens: int = 0,
    ) -> StepCost:
        """Return the cost of a step.

        `cached` is the share of the model's weights in the slice's memory. `alpha` is for hybrid
        GEMMs; None: our own dataflows. Every sequence is `extra_tokens` longer than in the step."""
        key = (model.shape.name, simulated.slice.id)
        terms = self._terms.get(key)
        if terms is None:
            terms = self._terms[key] = self._prepare(model, simulated)
        if terms.table is not None:
            floor_s, share = table_seconds(step, terms.table, extra_tokens)
            return StepCost(floor_s, model.spec.weight_bytes * (1.0 - cached), share)
        if terms.kernels is not None and alpha is None:
            return _of_kernels(step, model, terms, terms.kernels, cached, extra_tokens)
        tokens = pairs = context = 0
        for part in step.seqs:
            start = part.start + extra_tokens
            end = start + part.tokens
            tokens += part.tokens
            pairs += part.tokens * (start + end + 1) // 2
            context += end + part.tokens
        weights = model.spec.step_bytes(tokens)
        streamed = weights * (1.0 - cached)
        compute_s = terms.token_s * tokens + terms.pair_s * pairs
        memory_s = (
            terms.byte_s * weights * cached
            + terms.kv_token_s * context
            + terms.activation_s * tokens
        )
        if alpha is not None:
            memory_s += (1.0 - cached) * (1.0 - alpha) * terms.partial_token_s * tokens
            streamed *= alpha * ceil(tokens / _TILE) + 1.0 - alpha
        floor_s = max(compute_s, memory_s) + terms.fixed_s
        share = float(compute_s >= memory_s)
        return StepCost(floor_s, streamed, share, memory_s * simulated.hbm_bytes_per_s)

    def _prepare(self, model: SimModel, simulated: SimulatedSlice) -> _Terms:
        shape = model.shape
        hidden = shape.heads * shape.head_dim
        kernels = None if shape.experts else simulated.kernels
        return _Terms(
            token_s=2.0 * shape.active_parameters / simulated.flops,
            pair_s=4.0 * shape.layers * hidden / simulated.flops,
            activation_s=_ACTIVATION_FACTOR * shape.layers * hidden / simulated.hbm_bytes_per_s,
            kv_token_s=shape.kv_token_bytes / simulated.hbm_bytes_per_s,
            byte_s=1.0 / simulated.hbm_bytes_per_s,
            partial_token_s=4.0 * shape.active_parameters / _TILE / simulated.hbm_bytes_per_s,
            fixed_s=simulated.step_s,
            table=self._tables.get(shape.table, simulated.table),
            kernels=kernels,
            row_s=0.0 if kernels is None else kernels.layers_s(shape, 1),
            layers=shape.layers,
            output_bytes=float(shape.item_bytes * shape.vocabulary_parameters),
            kv_layer_bytes=shape.kv_token_bytes / shape.layers,
            pair_flop=4.0 * hidden,
        )


def _of_kernels(
    step: Step, model: SimModel, terms: _Terms, kernels: KernelTimes, cached: float, extra: int
) -> StepCost:
    """Return the cost of a step by measured times of its kernels. GEMMs whose weights stream read
    the `cached` share of them in memory, and compute as much as any."""
    tokens = pairs = context = longest = emits = 0
    for part in step.seqs:
        start = part.start + extra
        end = start + part.tokens
        tokens += part.tokens
        emits += part.emits
        if part.tokens == 1:
            context += end
            longest = max(longest, end)
        else:
            pairs += part.tokens * (start + end + 1) // 2
    gemms_s = kernels.layers_s(model.shape, tokens)
    one_s = terms.row_s
    read_s = cached * one_s
    bound = gemms_s > _WAITS * one_s
    if cached < 1.0:
        gemms_s = max(cached * gemms_s, terms.token_s * tokens)
    memory_s = terms.activation_s * tokens + terms.layers * kernels.others_s
    if emits and terms.output_bytes:
        memory_s += kernels.gemm_s(emits, terms.output_bytes)
    if context:
        token_bytes = terms.kv_layer_bytes
        each_s = kernels.decodes_s(context * token_bytes, longest * token_bytes)
        memory_s += terms.layers * each_s
    compute_s = 0.0
    if pairs:
        compute_s = terms.layers * kernels.prompts_s(terms.pair_flop * pairs)
    arithmetic_s = compute_s + gemms_s if bound else 0.0
    compute_s += max(0.0, gemms_s - read_s)
    floor_s = compute_s + min(gemms_s, read_s) + memory_s
    streamed = model.spec.step_bytes(tokens) * (1.0 - cached)
    return StepCost(floor_s, streamed, compute_s / floor_s, 0.0, arithmetic_s)


def table_seconds(step: Step, table: StepTable, extra_tokens: int) -> tuple[float, float]:
    """Return the seconds of a step, and the share of prefills.

    Decodes run as one batch, prefills one after another. The fixed cost of a step counts once."""
    prefill_s = 0.0
    prefills = decodes = length = 0
    for part in step.seqs:
        if part.tokens == 1 and part.start:
            decodes += 1
            length += part.start + extra_tokens
        else:
            prefills += 1
            prefill_s += table.prefill_s(part.start, part.tokens)
    total_s = prefill_s
    if decodes:
        total_s += table.decode_s(decodes, length / decodes)
        prefills += 1
    return total_s - table.base_s * max(0, prefills - 1), prefill_s / total_s


def spread_of(random: Random, sigma: float) -> float:
    """Return `random.lognormvariate(0.0, sigma)` to the bit, by the same method (Kinderman and
    Monahan). The library's is interpreted, and was a fiftieth of compiled simulations."""
    uniform = random.random
    while True:
        above, below = uniform(), 1.0 - uniform()
        z = _MAGIC * (above - 0.5) / below
        if z * z / 4.0 <= -log(below):
            return exp(z * sigma)
