"""What a slice has room for if all weights stream (C2CServe section 6.2)."""

from c2cserve.policy.cluster.link_and_memory import LinkAndMemory, carries
from c2cserve.policy.cluster.placement import Ask
from c2cserve.policy.cluster.slice_load import SliceLoad


class StreamsOnly(LinkAndMemory):
    """`LinkAndMemory` for slices that keep no weights."""

    def activation(self, ask: Ask, load: SliceLoad) -> tuple[bool, int] | None:
        """Return that its weights stream, if the link carries them beside the others, or alone."""
        if not load.keeps:
            return super().activation(ask, load)
        alone = not self.link_bytes_per_s(load)
        return (False, 0) if alone or carries(load, ask.spec, ask.request.slo.tpot_s) else None


STREAMS_ONLY = StreamsOnly(rotates=False)
