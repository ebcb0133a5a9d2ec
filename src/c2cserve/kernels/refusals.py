"""What the operators say to tensors they cannot take."""

from torch import Tensor


def misfit(op: str, **tensors: Tensor | None) -> ValueError:
    """What is wrong is visible from what was given."""
    seen = ", ".join(
        f"{name} {str(t.dtype).removeprefix('torch.')}{list(t.shape)} strides {list(t.stride())}"
        for name, t in tensors.items()
        if t is not None
    )
    return ValueError(f"{op}: these do not fit, or are not dense where they have to be: {seen}")


def misplaced_token(
    op: str, token: int, positions: Tensor, table: int, slots: Tensor, arena: Tensor
) -> ValueError:
    """`table`: how many positions there are."""
    return ValueError(
        f"{op}: token {token} has position {int(positions[token])} of {table} and slot "
        f"{int(slots[token])} of an arena of {arena.nbytes} bytes"
    )


def misplaced_sequence(
    op: str, sequence: int, context_len: Tensor, tokens: int, arena: Tensor
) -> ValueError:
    return ValueError(
        f"{op}: sequence {sequence} of {int(context_len[sequence])} tokens does not lie within "
        f"{tokens} rows, its block table and an arena of {arena.nbytes} bytes"
    )
