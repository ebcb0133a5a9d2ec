"""What a server does before it listens: find GPUs, plan slices and the pool, prepare models."""

import logging
import resource
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from c2cserve.catalog.file import Catalog
from c2cserve.core.machine import Gpu, GpuShare, ProfileChoice, Slice
from c2cserve.core.policy_names import OWN, PolicyName
from c2cserve.core.tensors import LinkHome
from c2cserve.devices.discover import discover
from c2cserve.devices.gpus import GpuProblem, find_nvml
from c2cserve.devices.numa import reader_nodes, show_nodes, with_nodes
from c2cserve.devices.plan import NO_GPUS, SliceWishes, plan_all
from c2cserve.devices.slices import SlicePlanError, memory_beside_kv, plan_pool_bytes
from c2cserve.devices.topology import find_gpu_nodes
from c2cserve.engine.gpu.requirements import CPUS_INSTEAD, obstacles, usable_gpus
from c2cserve.kernels.native import KernelsMissing, chosen_isa, load_library
from c2cserve.policy.by_name import hybrid_alpha
from c2cserve.runtime.gateway import Refused
from c2cserve.server.connections import raise_file_limit
from c2cserve.serving.controller.catalog_host import CatalogHost
from c2cserve.serving.controller.directory import BrokenModel
from c2cserve.serving.controller.host import HostedModel
from c2cserve.terminal.output import CliError, CliErrors, show_bytes

log = logging.getLogger(__name__)

_OWN_FILES, _SLICE_FILES, _TEXT_FILES = 64, 8, 4
"""Open files of a server: its own, and those for each slice and for each text process. With one
slice and one text process it had 46 open at most, with two and three 56."""


@dataclass(frozen=True, slots=True)
class MachinePlan:
    """How a server uses its machine."""

    slices: Sequence[Slice]
    """They have the speed of their links."""
    pool_bytes: int
    """The budget of the pool."""
    pool_nodes: tuple[int, ...]
    """The NUMA nodes over which the pool's segments are spread; none: there is one node."""


def plan_machine(
    wishes: SliceWishes, pool_dir: Path, pool_bytes: int | None, policy: PolicyName = OWN
) -> MachinePlan:
    """Plan the use of this machine, by a server with this policy.

    `pool_bytes` replaces the planned budget. Raises CliError for wishes that this machine cannot
    fulfil."""
    if not pool_dir.is_dir():
        raise CliError(f"--pool-dir {pool_dir}: no such directory", 2)
    check_cpu_kernels()
    machine = discover(shm=pool_dir)
    if wishes.gpu_slices != NO_GPUS:
        gpus = ready_gpus(wishes.gpu_profile, lent=wishes.gpu_peer_bytes > 0)
        machine = replace(machine, gpus=gpus)
    try:
        slices = plan_all(machine, wishes, pool_bytes)
        room = memory_beside_kv(machine, slices)
    except SlicePlanError as error:
        raise CliError(str(error), 2) from error
    slices = with_links(slices, machine.gpus, streams=hybrid_alpha(policy) is not None)
    slices = with_nodes(slices, find_gpu_nodes(find_nvml(), machine.gpus))
    nodes = reader_nodes(machine, slices)
    if nodes:
        log.info("NUMA: %s", show_nodes(machine, nodes))
    if pool_bytes is None:
        pool_bytes = min(plan_pool_bytes(machine), room)
    elif pool_bytes > machine.shm_free_bytes:
        log.warning(
            "--pool-bytes allows %s, and %s has %s free: models that find no room there fail."
            " Give it a larger filesystem (--shm-size in a container), or allow less",
            show_bytes(pool_bytes), pool_dir, show_bytes(machine.shm_free_bytes),
        )  # fmt: skip
    return MachinePlan(slices, pool_bytes, nodes)


def fitting_policy(policy: PolicyName, slices: Sequence[Slice]) -> PolicyName:
    """Return the policy that these slices run. ServerlessLLM on CPU slices is `sllm+c`. What a
    published system lacks here is logged.

    Raises CliError for slices that the policy cannot use."""
    gpus = [one for one in slices if one.gpu is not None]
    if policy == "superinfer" and not any(one.host_kv_bytes for one in slices):
        raise CliError(
            "--policy superinfer rotates KV through host memory, and no slice has any: give"
            " --host-kv-bytes",
            2,
        )
    if hybrid_alpha(policy) is not None and len(gpus) < len(slices):
        log.warning(
            "--policy %s: CPU slices have no hybrid GEMMs and no alpha; their chunks follow learned"
            " step times",
            policy,
        )
    if policy != "serverlessllm" or len(gpus) == len(slices):
        return policy
    if gpus:
        raise CliError(
            "--policy serverlessllm uses GPU slices only: leave --slices and --threads out, or"
            " choose sllm+c, which uses CPU slices too",
            2,
        )
    log.warning(
        "--policy serverlessllm: there are no GPU slices, and it is tuned for GPUs; CPU slices run"
        " sllm+c, the same with limits of CPUs"
    )
    return "sllm+c"


def open_files(slices: int, text_processes: int) -> int:
    """Return how many files the server may have open, after raising the limit to the most.

    Raises CliError if that is less than it needs without clients."""
    files = raise_file_limit()
    needed = _OWN_FILES + slices * _SLICE_FILES + text_processes * _TEXT_FILES
    if files != resource.RLIM_INFINITY and files < needed:
        raise CliError(
            f"{files} open files are allowed (ulimit -n), and this server needs at least {needed}, "
            "with one more for each client: run `ulimit -n 65536` before it"
            " (systemd: LimitNOFILE=65536, docker: --ulimit nofile=65536)"
        )
    return files


def check_cpu_kernels() -> None:
    """Raise CliError, with the command that builds them, unless the CPU kernels can be loaded.

    Servers with GPU slices need them too: to convert weights as they are loaded."""
    try:
        load_library(chosen_isa())
    except (KernelsMissing, ValueError, OSError) as error:
        raise CliError(str(error)) from error


def ready_gpus(profile: ProfileChoice, *, lent: bool = False) -> tuple[Gpu, ...]:
    """Return the GPUs of this machine, which can all serve. `lent`: neighbours lend memory.

    Raises CliError with the fix for the first obstacle. CPUs never replace a GPU silently."""
    try:
        gpus = usable_gpus()
    except GpuProblem as problem:
        raise CliError(f"the GPU driver fails: {problem}; {CPUS_INSTEAD}") from problem
    for obstacle in obstacles(gpus, profile, lent=lent) if gpus else ():
        raise CliError(f"{obstacle.text}: {obstacle.fix}; or {CPUS_INSTEAD}")
    return gpus


def with_links(
    slices: Sequence[Slice], gpus: Sequence[Gpu], *, streams: bool = False
) -> tuple[Slice, ...]:
    """Return the slices with the share that each has of its GPU's link to the host, and of what
    neighbours' links add to its loads. Shares are equal, and links are as fast as the profiles of
    the GPU and of its paths say. CPU slices have none.

    `streams`: weights are never loaded. Where neighbours lend memory, the link is the one to them.

    Raises CliError without a profile."""
    named = {gpu.uuid: gpu for gpu in gpus}
    sharing = Counter(one.link for one in slices)
    linked: list[Slice] = []
    for one in slices:
        if one.gpu is not None:
            home = "peer" if streams and one.gpu.lenders else "host"
            rate = _link_bytes_per_s(named[one.gpu.uuid], one.gpu.profile, home)
            relayed = _relayed_bytes_per_s(named[one.gpu.uuid].name, one.gpu)
            one = replace(
                one, link_bytes_per_s=rate / sharing[one.link],
                relayed_bytes_per_s=relayed / sharing[one.link],
            )  # fmt: skip
        linked.append(one)
    return tuple(linked)


def _relayed_bytes_per_s(name: str, share: GpuShare) -> float:
    """Return what the links of GPUs that lend memory or links add to a GPU's own."""
    from c2cserve.transfer.path_profile import PathProfileError, load_paths

    count = len(share.lenders) + len(share.neighbours)
    if not count or share.profile == "assumed":
        return 0.0
    try:
        added = load_paths(name).relayed_bytes_per_s(count)
    except PathProfileError as error:
        log.warning("loads are planned as over one link: %s", error)
        return 0.0
    if not added:
        log.warning("loads are planned as over one link: run c2cserve profile --gpu-relays")
    return added


def _link_bytes_per_s(gpu: Gpu, choice: ProfileChoice, home: LinkHome) -> float:
    """Return how fast copy engines bring weights from the host, or from a peer, to the GPU."""
    from c2cserve.kernels.gpu.gemm.choice.assumed import assumed_profile
    from c2cserve.kernels.gpu.gemm.choice.profile import ProfileError, load_profile

    if choice == "assumed":
        profile = assumed_profile(gpu.name, gpu.memory_bytes).profile
    else:
        try:
            profile = load_profile(gpu=gpu.name)
        except ProfileError as error:
            raise CliError(str(error)) from error
    if home not in profile.links:
        raise CliError(
            f"the profile of {gpu.name} has no speed of the {home}: run c2cserve profile"
        )
    return profile.links[home].to_gpu_bytes_per_s


def prepare_models(
    host: CatalogHost, catalog: Catalog, *, strict: bool
) -> tuple[list[HostedModel], list[BrokenModel]]:
    """Return the catalogue's models, and those whose checkpoints cannot be served.

    Raises CliErrors with one line per broken model if no model is left, or if `strict`."""
    models: list[HostedModel] = []
    broken: list[BrokenModel] = []
    for entry, raw in zip(catalog.entries, catalog.raw, strict=True):
        try:
            models.append(host.prepare(dict(raw)))
        except Refused as refused:
            broken.append(BrokenModel(entry.id, entry.aliases, dict(raw), refused.reason))
    if broken and (strict or not models):
        raise CliErrors([one.error for one in broken], 2)
    for one in broken:
        log.error("%s; it is failed until it is reloaded", one.error)
    return models, broken


def check_pinned(models: Sequence[HostedModel], budget_bytes: int) -> None:
    """Raise CliError if the pinned models do not fit into the pool together."""
    pinned = [model for model in models if model.spec.pinned]
    needed = sum(model.spec.weight_bytes for model in pinned)
    if needed > budget_bytes:
        names = ", ".join(model.spec.id for model in pinned)
        raise CliError(
            f"the pinned models ({names}) take {needed} bytes of the host weight pool, whose "
            f"budget is {budget_bytes}: raise --pool-bytes or pin fewer"
        )
