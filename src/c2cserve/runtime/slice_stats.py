"""The table of what a worker counts about its slice.

Each row is a field of `SliceStats`: its name, kind, unit, help text and where the worker reads it.
The status page, the snapshot, the admin API and `/metrics` are made from this table. A new row
needs one more place only: the code that counts.
"""

from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Literal

Kind = Literal["gauge", "counter"]


class StatSource(Enum):
    """Where a worker reads a value."""

    LOOP = "loop"
    """The slice's loop adds to the page when something happens."""
    POLICY = "policy"
    """The slice's policy counts; the loop copies the value after every tick."""
    ENGINE = "engine"
    """The engine counts; the loop copies the value after every tick."""


@dataclass(frozen=True, slots=True)
class Stat:
    """One row of the table."""

    name: str
    """The field of `SliceStats`, also the key in the admin API."""
    kind: Kind
    unit: str
    help: str
    """The help text in `/metrics`."""
    source: StatSource
    metric: str
    """The full name in `/metrics`."""


def _row(kind: Kind, unit: str, source: StatSource, help_: str, metric: str = "") -> int:
    """Return a dataclass field (typed as its values are) that carries the row."""
    row = {"kind": kind, "unit": unit, "source": source, "help": help_, "metric": metric}
    return field(default=0, metadata=row)


def _gauge(unit: str, source: StatSource, help_: str) -> int:
    return _row("gauge", unit, source, help_)


def _counter(unit: str, source: StatSource, help_: str, metric: str = "") -> int:
    return _row("counter", unit, source, help_, metric)


_LOOP, _POLICY, _ENGINE = StatSource.LOOP, StatSource.POLICY, StatSource.ENGINE


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceStats:
    """Values of the table for one slice. Counters start at 0 with the worker's process. Weights,
    graphs and FlashInfer concern GPU slices only: a CPU slice shows 0."""

    running: int = _gauge("requests", _POLICY, "Requests started.")
    waiting: int = _gauge("requests", _POLICY, "Requests queued at the slice.")
    kv_used_bytes: int = _gauge("bytes", _POLICY, "KV cache held by requests.")
    weights_kept_bytes: int = _gauge(
        "bytes", _ENGINE, "Weights kept in what KV leaves of the arena."
    )
    weights_lent_bytes: int = _gauge(
        "bytes", _ENGINE, "Weights in memory that neighbouring GPUs lend to the slice's GPU."
    )
    kv_host_bytes: int = _gauge(
        "bytes", _ENGINE, "KV in host memory, of requests that are paused or may be."
    )
    prefix_host_bytes: int = _gauge(
        "bytes", _ENGINE, "Cached prefixes in host memory, beside that KV."
    )
    steps: int = _counter("steps", _LOOP, "Steps run.")
    prefill_steps: int = _counter("steps", _ENGINE, "Steps begun that compute prompts.")
    switched_steps: int = _counter(
        "steps", _ENGINE, "Other steps begun, of another model than the step before."
    )
    switches: int = _counter("steps", _LOOP, "Steps that ran another model than the step before.")
    prefill_compute_seconds: float = _counter(
        "seconds", _ENGINE, "Seconds for which steps with prompts occupied what computes."
    )
    decode_compute_seconds: float = _counter("seconds", _ENGINE, "The same of decode steps.")
    switched_compute_seconds: float = _counter(
        "seconds", _ENGINE, "The same of decode steps after a switch."
    )
    prefill_batch_seconds: float = _counter(
        "seconds", _ENGINE, "Host seconds for batches of steps with prompts."
    )
    decode_batch_seconds: float = _counter("seconds", _ENGINE, "The same of decode steps.")
    switched_batch_seconds: float = _counter(
        "seconds", _ENGINE, "The same of decode steps after a switch."
    )
    prefill_launch_seconds: float = _counter(
        "seconds", _ENGINE, "Host seconds for launching steps with prompts (CPU: computing them)."
    )
    decode_launch_seconds: float = _counter("seconds", _ENGINE, "The same of decode steps.")
    switched_launch_seconds: float = _counter(
        "seconds", _ENGINE, "The same of decode steps after a switch."
    )
    prefill_completion_seconds: float = _counter(
        "seconds", _ENGINE, "Host seconds for tokens and outcomes of steps with prompts."
    )
    decode_completion_seconds: float = _counter("seconds", _ENGINE, "The same of decode steps.")
    switched_completion_seconds: float = _counter(
        "seconds", _ENGINE, "The same of decode steps after a switch."
    )
    step_wait_seconds: float = _counter(
        "seconds", _ENGINE, "Host seconds of waits for a step, to launch the one that needs it."
    )
    policy_seconds: float = _counter("seconds", _LOOP, "Host seconds of decisions.")
    submit_seconds: float = _counter(
        "seconds", _LOOP, "Host seconds of submitting steps: batch, launch, and what is beside."
    )
    action_seconds: float = _counter(
        "seconds", _LOOP, "Host seconds of other decisions' effects: moves of KV, loads, releases."
    )
    poll_seconds: float = _counter(
        "seconds", _LOOP, "Host seconds of messages, completions and this table."
    )
    sleep_seconds: float = _counter(
        "seconds", _LOOP, "Seconds for which the slice's thread slept, or waited for a processor."
    )
    in_flight_seconds: float = _counter("seconds", _LOOP, "Seconds with a step in flight.")
    bubble_seconds: float = _counter(
        "seconds", _LOOP, "Seconds without a step in flight though the slice had requests."
    )
    loading_bubble_seconds: float = _counter(
        "seconds", _LOOP, "Of those, seconds while a whole model was being loaded."
    )
    turns: int = _counter(
        "turns", _POLICY, "Turns of models begun, and groups of prompts (`--policy aegaeon`)."
    )
    contended_seconds: float = _counter(
        "seconds", _POLICY, "Seconds for which steps did not overlap: requests competed for memory."
    )
    prompt_tokens: int = _counter("tokens", _LOOP, "Prompt tokens received.")
    output_tokens: int = _counter("tokens", _LOOP, "Tokens drawn.")
    cached_tokens: int = _counter("tokens", _POLICY, "Prompt tokens reused.")
    cached_host_tokens: int = _counter(
        "tokens", _POLICY, "Of those, tokens whose KV was brought from host memory."
    )
    prefix_arena_hits: int = _counter(
        "requests", _POLICY, "Starts of requests that found a part of their prompts in the arena."
    )
    prefix_host_hits: int = _counter(
        "requests", _POLICY, "Starts of requests for which a prefix was brought from host memory."
    )
    prefix_slower_tokens: int = _counter(
        "tokens", _POLICY, "Tokens computed although host memory had them, as that was quicker."
    )
    preemptions: int = _counter(
        "requests", _POLICY, "Requests preempted for memory.", "vllm:num_preemptions"
    )
    kv_drops: int = _counter(
        "requests", _POLICY, "Of those, requests whose KV was dropped: the host had no room for it."
    )
    weights_hit_bytes: int = _counter("bytes", _ENGINE, "Bytes of weights that steps read in HBM.")
    weights_streamed_bytes: int = _counter(
        "bytes", _ENGINE, "Bytes of weights that steps read over the link."
    )
    weights_peer_bytes: int = _counter(
        "bytes", _ENGINE, "Of those, from memory that neighbouring GPUs lend."
    )
    hybrid_hbm_bytes: int = _counter(
        "bytes", _ENGINE, "Bytes that hybrid GEMMs asked of HBM (`--policy c2cserve-published`)."
    )
    alpha_changes: int = _counter(
        "changes", _ENGINE, "How often the split of a model's hybrid GEMMs was changed."
    )
    weight_fetches: int = _counter("loads", _ENGINE, "Loads of a whole model into the arena begun.")
    weight_fetched_bytes: int = _counter("bytes", _ENGINE, "Bytes of weights that loads copied.")
    weight_fetch_seconds: float = _counter(
        "seconds", _ENGINE, "Seconds for which loads of whole models were copying."
    )
    weight_releases: int = _counter("models", _ENGINE, "Whole models dropped from the arena.")
    weight_fetches_cancelled: int = _counter("loads", _ENGINE, "Loads that ended before their end.")
    weight_fetches_refused: int = _counter(
        "loads", _ENGINE, "Loads without a place, and loaded models that KV displaced: they stream."
    )
    attaches: int = _counter("models", _ENGINE, "Models attached: mapped, prepared, pinned.")
    attach_seconds: float = _counter(
        "seconds", _ENGINE, "Seconds for which attaching models kept the slice from planning steps."
    )
    graph_steps: int = _counter("steps", _ENGINE, "Steps launched as one CUDA graph.")
    graph_captures: int = _counter("graphs", _ENGINE, "CUDA graphs captured.")
    graph_capture_failures: int = _counter(
        "graphs", _ENGINE, "Captures that failed: such steps are launched kernel by kernel."
    )
    graphs_dropped: int = _counter(
        "graphs", _ENGINE, "CUDA graphs dropped for newer ones, or because weights moved."
    )
    flash_steps: int = _counter("steps", _ENGINE, "Long steps with FlashInfer's attention.")
    flash_missed_steps: int = _counter("steps", _ENGINE, "Those it has no module for.")
    gemms_warmed: int = _counter("GEMMs", _ENGINE, "GEMMs of prompts run before prompts need them.")
    gemm_warm_seconds: float = _counter(
        "seconds", _ENGINE, "Seconds of the slice's thread that these took."
    )
    kv_out_bytes: int = _counter(
        "bytes", _ENGINE, "Bytes of KV copied to host memory, beside cached prefixes."
    )
    kv_in_bytes: int = _counter("bytes", _ENGINE, "Bytes of KV copied back.")
    prefix_out_bytes: int = _counter(
        "bytes", _ENGINE, "Bytes of cached prefixes copied to host memory."
    )
    prefix_in_bytes: int = _counter(
        "bytes", _ENGINE, "Bytes of cached prefixes brought from host memory."
    )
    prefix_in_seconds: float = _counter(
        "seconds", _ENGINE, "Seconds for which prefixes were on their way from host memory."
    )
    transfer_in_bytes: int = _counter(
        "bytes", _ENGINE, "Bytes from host memory over the GPU's own link, by its copy engine."
    )
    transfer_out_bytes: int = _counter("bytes", _ENGINE, "Bytes to host memory over that link.")
    transfer_relayed_in_bytes: int = _counter(
        "bytes", _ENGINE, "Bytes from host memory over links of neighbours that relay."
    )
    transfer_relayed_out_bytes: int = _counter(
        "bytes", _ENGINE, "Bytes to host memory over links of neighbours that relay."
    )
    transfer_peer_bytes: int = _counter("bytes", _ENGINE, "Bytes from another GPU's memory.")
    transfer_resent_tasks: int = _counter(
        "tasks", _ENGINE, "Micro-tasks of relays that were sent again over another link."
    )
    transfer_relay_stalls: int = _counter(
        "tasks", _ENGINE, "Relays that were recalled because they were late."
    )
    transfer_relay_errors: int = _counter("errors", _ENGINE, "Relays that ended with an error.")
    step_failures: int = _counter("steps", _LOOP, "Steps that ended with an exception.")
    step_retries: int = _counter("requests", _POLICY, "Requests of failed steps that ran again.")
    retries_failed: int = _counter("requests", _POLICY, "Those that failed again, alone.")
    grammars_failed: int = _counter(
        "requests", _ENGINE, "Requests that ended because their grammars could not go on."
    )
    grammar_waits: int = _counter(
        "requests", _ENGINE, "Requests that left the steps for a while, as their masks were late."
    )
    grammar_processes_lost: int = _counter(
        "processes", _ENGINE, "Grammar processes that ended while they were needed."
    )
    parts_rebuilt: int = _counter(
        "rebuilds", _ENGINE, "How often GPU state was built anew after a failed step."
    )


def _stat(name: str, kind: Kind, unit: str, source: StatSource, help: str, metric: str) -> Stat:
    return Stat(name, kind, unit, help, source, metric or f"c2cserve:slice_{name}")


STATS: tuple[Stat, ...] = tuple(_stat(one.name, **one.metadata) for one in fields(SliceStats))
"""The rows, in the order of the fields."""
