"""What an executor counts, as rows of the slice's table (`runtime.slice_stats`)."""

from c2cserve.engine.executor import Executor
from c2cserve.engine.step_costs import KINDS


def kv_stats(executor: Executor) -> dict[str, float]:
    """Return the engine's rows about KV in host memory."""
    host_kv, prefixes = executor.host_kv, executor.prefixes
    return {
        "kv_host_bytes": host_kv.used_bytes - prefixes.used_bytes,
        "kv_out_bytes": host_kv.counts.out_bytes, "kv_in_bytes": host_kv.counts.in_bytes,
        "prefix_host_bytes": prefixes.used_bytes, "prefix_out_bytes": prefixes.counts.saved_bytes,
        "prefix_in_bytes": prefixes.counts.brought_bytes,
        "prefix_in_seconds": prefixes.counts.bring_s,
    }  # fmt: skip


def step_stats(executor: Executor) -> dict[str, float]:
    """Return the engine's rows about the time of steps."""
    costs, compute = executor.costs, executor.compute_seconds()
    rows: dict[str, float] = {
        "prefill_steps": costs.steps["prefill"], "switched_steps": costs.steps["switched"],
        "step_wait_seconds": costs.wait_s,
    }  # fmt: skip
    of_kinds = (
        ("compute", compute), ("batch", costs.batch_s), ("launch", costs.launch_s),
        ("completion", costs.completion_s),
    )  # fmt: skip
    for name, seconds in of_kinds:
        rows |= {f"{kind}_{name}_seconds": seconds[kind] for kind in KINDS}
    return rows
