"""What the paths of a machine carry, alone and combined, as `c2cserve profile` has measured it.

One JSON file beside the GPU's profile. The server reads from it what neighbours add to loads, and
how transfers are cut. Without it, loads are planned with one link and nothing is tuned.
"""

import datetime
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from c2cserve.core.machine import Link, LinkGroup, relayed_bytes_per_s
from c2cserve.kernels.gpu.gemm.choice.profile import profile_path
from c2cserve.transfer.settings import RelayShape, Settings

_VERSION = 1
_SUFFIX = ".paths.json"
_PROFILE_IT = "run `c2cserve profile --gpu-relays`"

Count = Annotated[int, Meta(ge=0)]
Positive = Annotated[int, Meta(ge=1)]
Rate = Annotated[float, Meta(gt=0)]


class PathProfileError(Exception):
    """There are no figures of this machine's paths. The message is one line that says why."""


class PathsMissing(PathProfileError):
    """Nothing was measured here."""


class Rates(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Bytes per second of large transfers. `both` is the sum of both directions at once."""

    into: Rate
    out: Rate
    both: Rate


class PathProfile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    gpu: str
    """The driver's name of all GPUs."""
    date: Annotated[datetime.datetime, Meta(tz=True)]
    alone: Annotated[tuple[Rates, ...], Meta(min_length=1)]
    """CUDA's copies over the link of each GPU, by number."""
    at_once: tuple[Rate, ...] = ()
    """Copies into the first 2, 3 ... GPUs at the same time, in sum: what host memory gives."""
    combined: tuple[Rates, ...] = ()
    """Transfers of the first GPU over the links of 2, 3 ... GPUs."""
    task_bytes_most: Positive = Settings().task_bytes_most
    """The largest micro-task with which those were fastest."""
    kernel_in_bytes: Count = 0
    kernel_out_bytes: Count = 0
    """`transfer.settings.Settings` has these two."""
    kernel_ctas: Positive = RelayShape().ctas
    version: int = _VERSION

    def links(self) -> tuple[tuple[Link, ...], tuple[LinkGroup, ...]]:
        """Return the links into all GPUs, and what some of them carry together for the first one:
        host memory, and what relaying costs, are shared."""
        links = [
            Link(f"pcie{gpu}", "host", f"gpu{gpu}", one.into) for gpu, one in enumerate(self.alone)
        ]
        names = [link.id for link in links]
        groups = [
            LinkGroup(f"host{count}", tuple(names[:count]), one.into)
            for count, one in enumerate(self.combined, 2)
        ]
        return tuple(links), tuple(groups)

    def relayed_bytes_per_s(self, neighbours: int) -> float:
        """Return what so many idle neighbours add to loads of a GPU. What was not measured adds
        nothing."""
        links, groups = self.links()
        known = min(neighbours, len(self.combined))
        own, *others = [link.id for link in links][: known + 1]
        return relayed_bytes_per_s(links, groups, own, others)

    def tuned(self, settings: Settings) -> Settings:
        """Return settings with what was measured here. No micro-task becomes larger: a step's own
        copies may have to wait for one."""
        most = min(self.task_bytes_most, settings.task_bytes_most)
        return replace(
            settings, task_bytes=min(settings.task_bytes, most), task_bytes_most=most,
            kernel_in_bytes=self.kernel_in_bytes, kernel_out_bytes=self.kernel_out_bytes,
        )  # fmt: skip

    @property
    def own_shape(self) -> RelayShape:
        """The kernel that carries small segments."""
        return RelayShape(self.kernel_ctas)


def paths_path(profile: Path | None = None) -> Path:
    """Return where the file lies, beside a GPU's profile (default: this machine's)."""
    return (profile or profile_path()).with_suffix(_SUFFIX)


def load_paths(gpu: str, path: Path | None = None) -> PathProfile:
    """Return the figures of a machine with this GPU.

    Raises `PathsMissing` if there is no file, and `PathProfileError` for one that is of another GPU
    or version, or that is no such file."""
    path = path or paths_path()
    try:
        found = msgspec.json.decode(path.read_bytes(), type=PathProfile)
    except FileNotFoundError as error:
        raise PathsMissing(f"{path}: paths were not measured: {_PROFILE_IT}") from error
    except OSError as error:
        raise PathProfileError(f"{path}: cannot be read: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise PathProfileError(f"{path}: {error}: {_PROFILE_IT}") from error
    if found.version != _VERSION or found.gpu != gpu:
        why = f"version {found.version} of {found.gpu}, this is {_VERSION} of {gpu}"
        raise PathProfileError(f"{path}: {why}: {_PROFILE_IT}")
    return found


def save_paths(found: PathProfile, path: Path | None = None) -> Path:
    """Write the file whole, and return where. Raises OSError."""
    path = path or paths_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".new")
    partial.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")
    return partial.replace(path)


def show_paths(found: PathProfile) -> str:
    """Return the figures in lines, in GB/s."""

    def line(name: str, one: Rates) -> str:
        into, out, both = (f"{rate / 1e9:.1f}" for rate in (one.into, one.out, one.both))
        return f"{name}: in {into}, out {out}, both ways {both}"

    lines = [line(f"GPU {gpu} by its link", one) for gpu, one in enumerate(found.alone)]
    lines += [line(f"GPU 0 over {n} links", one) for n, one in enumerate(found.combined, 2)]
    if found.at_once:
        sums = ", ".join(f"{n} GPUs {rate / 1e9:.1f}" for n, rate in enumerate(found.at_once, 2))
        lines.append(f"copies into several at once: {sums}")
    lines.append(f"micro-tasks of {found.task_bytes_most >> 20} MiB at most; {_small(found)}")
    return "\n".join(lines)


def _small(found: PathProfile) -> str:
    sizes: Sequence[tuple[str, int]] = (
        ("in", found.kernel_in_bytes), ("out", found.kernel_out_bytes)
    )  # fmt: skip
    said = [f"{way} shorter than {size >> 10} KiB" for way, size in sizes if size]
    if not said:
        return "copy engines carry segments of all sizes"
    return f"a kernel of {found.kernel_ctas} CTAs carries segments {', '.join(said)}"
