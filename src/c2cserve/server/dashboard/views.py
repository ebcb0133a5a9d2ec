"""Parts of the state that a live server and a record make in the same way."""

from collections.abc import Iterable, Mapping, Sequence
from statistics import median

from c2cserve.core.machine import Slice
from c2cserve.server.dashboard.state import LinkView, SliceView
from c2cserve.server.dashboard.timelines import Timelines


def quantile(values: Sequence[float], share: float) -> float | None:
    """Return the value below which this share of the values lies; None without values."""
    if not values:
        return None
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def targets_of(timelines: Timelines, model: str, now: float) -> dict[str, float | int | None]:
    """Return the fields of `ModelView` about a model's targets."""
    slo, judged = timelines.targets(model), timelines.judged(model, now)
    ttft = [one.ttft_s for one in judged]
    tpot = [one.tpot_s for one in judged if one.tpot_s is not None]
    return {
        "ttft_target_s": None if slo is None else slo.ttft_s,
        "tpot_target_s": None if slo is None else slo.tpot_s,
        "judged": len(judged),
        "met": sum(one.met for one in judged),
        "ttft_p50_s": median(ttft) if ttft else None,
        "ttft_p95_s": quantile(ttft, 0.95),
        "tpot_p50_s": median(tpot) if tpot else None,
    }


def links_of(
    known: Mapping[str, Slice], views: Iterable[SliceView], *, simulated: bool = False
) -> tuple[LinkView, ...]:
    """Return every link that a slice's weights come over. `known`: slices by id."""
    on_link: dict[str, list[tuple[Slice, SliceView]]] = {}
    for view in views:
        one = known.get(view.id)
        if one is not None and view.link:
            on_link.setdefault(view.link, []).append((one, view))
    return tuple(_link(name, parts, simulated) for name, parts in sorted(on_link.items()))


def _link(name: str, parts: Sequence[tuple[Slice, SliceView]], simulated: bool) -> LinkView:
    assumed = any(one.gpu is not None and one.gpu.profile == "assumed" for one, _ in parts)
    return LinkView(
        id=name, slices=tuple(view.id for _, view in parts),
        bytes_per_s=sum(one.link_bytes_per_s for one, _ in parts),
        origin="simulated" if simulated else "assumed" if assumed else "measured",
        used_bytes_per_s=sum(v.streamed_bytes_per_s + v.loaded_bytes_per_s for _, v in parts),
    )  # fmt: skip


def link_of(one: Slice) -> str:
    """Return the link of a slice; empty where its weights lie in its own memory. A slice that is
    alone on a link may leave it without a name."""
    return (one.link or one.id) if one.link_bytes_per_s > 0.0 else ""
