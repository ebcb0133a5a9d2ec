"""Which models may stream their weights over one link at the same time (C2CServe sections 6.1, 6.2
and 3.3.1).

A model whose weights stay in host memory takes link bandwidth, not HBM. To keep its pace it needs

    BW_m = (1 - resident_m) * S_m / TPOT_m          sum over active m of BW_m <= BW_avail

where `S_m` is what one decode step reads of it (a mixture of experts: what its batch chooses) and
`resident_m` the share of that which the slice's HBM holds (ours; the paper has 0). Rates are whole
bytes per second, so that books which are added to and taken from for days stay exact.
"""

from collections.abc import Hashable, Iterable, Mapping
from math import ceil


def link_demand(step_bytes: int, tpot_s: float, resident: float = 0.0) -> int:
    """Bytes per second a model needs of the link to make one decode step per `tpot_s` (section 6.2,
    first formula). `step_bytes`: weights read by a step; `resident`: share of them in HBM, 0..1."""
    if tpot_s <= 0.0 or not 0.0 <= resident <= 1.0:
        raise ValueError(f"no pace of {tpot_s} s with {resident} of the weights resident")
    return ceil((1.0 - resident) * step_bytes / tpot_s)


class LinkBudget:
    """Books of one link: who streams over it, and at what rate. A key is whatever names a stream,
    for example (slice, model). `bytes_per_s` 0: weights do not cross a link, everything fits."""

    __slots__ = ("_demands", "bytes_per_s", "used_bytes_per_s")

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s = int(bytes_per_s)
        self.used_bytes_per_s = 0
        self._demands: dict[Hashable, int] = {}

    def __contains__(self, key: Hashable) -> bool:
        return key in self._demands

    @property
    def load(self) -> float:
        """Share of the link that is promised; above 1: somebody will miss its pace."""
        return self.used_bytes_per_s / self.bytes_per_s if self.bytes_per_s else 0.0

    def fits(self, demand: int, key: Hashable = None) -> bool:
        """Would the link carry this too (section 6.2, second formula)? `key`: the stream it is
        for, if that is there already and would change its rate."""
        rest = self.used_bytes_per_s - self._demands.get(key, 0)
        return not self.bytes_per_s or rest + demand <= self.bytes_per_s

    def hold(self, key: Hashable, demand: int) -> None:
        """A stream begins, or changes its rate. Whether it fits was the caller's to ask: a model
        that must run somewhere does so on a link that is too busy, and the books say so."""
        self.release(key)
        self._demands[key] = demand
        self.used_bytes_per_s += demand

    def release(self, key: Hashable) -> None:
        """A stream ends; nothing if there is none."""
        self.used_bytes_per_s -= self._demands.pop(key, 0)


def feasible_set(demands: Iterable[tuple[str, int]], bytes_per_s: float) -> list[str]:
    """The models that can be active together, out of (model, demand) in order of preference: each
    one that still fits beside those before it (section 6.2, initial active set)."""
    budget = LinkBudget(bytes_per_s)
    active: list[str] = []
    for model, demand in demands:
        if budget.fits(demand):
            budget.hold(model, demand)
            active.append(model)
    return active


def lightest(neighbours: Mapping[str, Iterable[int]]) -> str:
    """Footprint-aware pairing of one newcomer (section 3.3.1: interference grows with the bytes
    that models on one link stream): the link whose models stream least. `neighbours`: link ->
    bytes each model there streams per step. Ties go to the smaller name. ValueError if empty."""
    return min(neighbours, key=lambda link: (sum(neighbours[link]), link))


def spread(footprints: Mapping[str, int], places: Mapping[str, int]) -> dict[str, str]:
    """Footprint-aware pairing of a whole set (section 3.3.1: large models are kept apart): model ->
    link, largest first onto the link that streams least so far. `footprints`: model -> bytes it
    streams per step; `places`: link -> models it takes. Models beyond all places are left out, the
    smallest ones. No link streams more than the others by more than its last model does, as long
    as places do not run out."""
    streamed = {link: [0] for link, count in places.items() if count}
    left = dict(places)
    pairing: dict[str, str] = {}
    for model in sorted(footprints, key=lambda name: (-footprints[name], name)):
        if not streamed:
            break
        link = lightest(streamed)
        pairing[model] = link
        streamed[link].append(footprints[model])
        left[link] -= 1
        if not left[link]:
            del streamed[link]
    return pairing
