"""What models whose weights stream ask of a link (C2CServe sections 6.1 and 6.2).

A model whose weights stay in host memory takes link bandwidth, not HBM. To keep its pace it needs

    BW_m = (1 - resident_m) * S_m / TPOT_m          sum over active m of BW_m <= BW_avail

`S_m` is what one decode step reads of it; of a mixture of experts, what its batch chooses.
`resident_m` is the share of that which the slice's HBM holds (ours; the paper has 0). Rates are
whole bytes per second, so that books which are added to and taken from for days stay exact. Who may
stream where by this is decided in `policy.cluster.placement`."""

from math import ceil


def link_demand(step_bytes: int, tpot_s: float, resident: float = 0.0) -> int:
    """Bytes per second a model needs of the link to make one decode step per `tpot_s` (section 6.2,
    first formula). `step_bytes`: weights read by a step; `resident`: share of them in HBM, 0..1."""
    if tpot_s <= 0.0 or not 0.0 <= resident <= 1.0:
        raise ValueError(f"no pace of {tpot_s} s with {resident} of the weights resident")
    return ceil((1.0 - resident) * step_bytes / tpot_s)
