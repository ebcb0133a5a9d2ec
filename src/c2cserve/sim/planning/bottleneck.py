"""Machines with more of one resource, to find by experiment which resource is the bottleneck."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from c2cserve.sim.world.hardware import SimMachine, SimulatedSlice
from c2cserve.sim.world.shapes import SimModel
from c2cserve.sim.world.tables import KernelTimes, Points, StepTable, Tables


def _link(machine: SimMachine, factor: float) -> SimMachine:
    links = tuple(
        (name, rate if name.endswith(".compute") else rate * factor) for name, rate in machine.links
    )

    rates = dict(machine.links)

    def faster(simulated: SimulatedSlice) -> SimulatedSlice:
        rate, load = simulated.slice.link_bytes_per_s * factor, simulated.load_bytes_per_s
        if simulated.h2d and load >= rates[simulated.h2d[0]]:  # the link alone limits its loads
            load *= factor
        relayed = simulated.slice.relayed_bytes_per_s * factor
        slice_ = replace(simulated.slice, link_bytes_per_s=rate, relayed_bytes_per_s=relayed)
        return replace(simulated, load_bytes_per_s=load, slice=slice_)

    return replace(machine, links=links, slices=tuple(map(faster, machine.slices)))


def _bandwidth(machine: SimMachine, factor: float) -> SimMachine:
    machine = _tables(machine, lambda table: replace(table, decode=_less(table.decode, factor)))
    slices = (
        replace(
            one, hbm_bytes_per_s=one.hbm_bytes_per_s * factor, kernels=_kernels(one, memory=factor)
        )
        for one in machine.slices
    )  # fmt: skip
    return replace(machine, slices=tuple(slices))


def _less(decode: Sequence[tuple[float, Points]], factor: float) -> list[tuple[float, Points]]:
    return [(length, [(x, y / factor) for x, y in points]) for length, points in decode]


def _compute(machine: SimMachine, factor: float) -> SimMachine:
    machine = _tables(
        machine, lambda table: replace(table, prefill=[(x, y / factor) for x, y in table.prefill])
    )
    slices = (
        replace(one, flops=one.flops * factor, kernels=_kernels(one, compute=factor))
        for one in machine.slices
    )
    return replace(machine, slices=tuple(slices))


def _kernels(
    simulated: SimulatedSlice, memory: float = 1.0, compute: float = 1.0
) -> KernelTimes | None:
    times = simulated.kernels
    return None if times is None else times.faster(memory, compute)


def _tables(machine: SimMachine, change: Callable[[StepTable], StepTable]) -> SimMachine:
    steps = {
        model: {device: _fresh(change(table)) for device, table in devices.items()}
        for model, devices in machine.hardware.tables.steps.items()
    }
    return replace(machine, hardware=replace(machine.hardware, tables=Tables(steps)))


def _fresh(table: StepTable) -> StepTable:
    """Copy the points without the cached lookups."""
    return StepTable(table.prefill, table.decode, table.base_s)


def _capacity(machine: SimMachine, factor: float) -> SimMachine:
    def larger(simulated: SimulatedSlice) -> SimulatedSlice:
        slab = simulated.slice.slab_bytes
        kv_bytes = int(simulated.slice.kv_bytes * factor) // slab * slab
        hbm_bytes = int(simulated.slice.hbm_bytes * factor)
        return replace(
            simulated, slice=replace(simulated.slice, kv_bytes=kv_bytes, hbm_bytes=hbm_bytes)
        )

    return replace(machine, slices=tuple(map(larger, machine.slices)))


def faster_gpus(machine: SimMachine, factor: float) -> SimMachine:
    """Divide all times of steps on GPUs by `factor`, fixed costs too. CPUs and links stay."""
    devices = {one.table for one in machine.slices if one.h2d}

    def faster(simulated: SimulatedSlice) -> SimulatedSlice:
        return replace(
            simulated, flops=simulated.flops * factor, step_s=simulated.step_s / factor,
            hbm_bytes_per_s=simulated.hbm_bytes_per_s * factor,
            kernels=_kernels(simulated, factor, factor),
        ) if simulated.h2d else simulated  # fmt: skip

    def steps(device: str, table: StepTable) -> StepTable:
        if device not in devices:
            return table
        prefill = [(x, y / factor) for x, y in table.prefill]
        return StepTable(prefill, _less(table.decode, factor), table.base_s / factor)

    tables = Tables(
        {
            model: {device: steps(device, table) for device, table in rows.items()}
            for model, rows in machine.hardware.tables.steps.items()
        }
    )
    hardware = replace(machine.hardware, tables=tables)
    return replace(machine, hardware=hardware, slices=tuple(map(faster, machine.slices)))


def _pool(machine: SimMachine, factor: float) -> SimMachine:
    pool_bytes = int(machine.hardware.pool_bytes * factor)
    return replace(machine, hardware=replace(machine.hardware, pool_bytes=pool_bytes))


RESOURCES: Mapping[str, Callable[[SimMachine, float], SimMachine]] = {
    "link": _link,
    "compute": _compute,
    "HBM bandwidth": _bandwidth,
    "HBM": _capacity,
    "host memory": _pool,
}
"""Resource -> a function that multiplies it in a machine. On CPUs, HBM is the host's memory. In a
measured table, prefills stand for compute and decodes for bandwidth."""


def could_bind(machine: SimMachine, models: Sequence[SimModel]) -> list[str]:
    """Return the names of `RESOURCES` whose capacity limits this machine and catalogue at all."""
    streams = any(simulated.h2d for simulated in machine.slices)
    weights = sum(model.spec.weight_bytes for model in models)
    left_out = {"link"} if not streams else set[str]()
    if weights <= machine.hardware.pool_bytes:
        left_out.add("host memory")
    return [name for name in RESOURCES if name not in left_out]
