"""A decoder layer out of single operators: what every fast way to run one must agree with."""

from collections.abc import Sequence

from torch import Tensor

from c2cserve.kernels.layer import Layer, Mlp, TokenRows
from c2cserve.kernels.ops import Ops


def run_layers(
    ops: Ops,
    hidden: Tensor,
    layers: Sequence[Layer],
    rows: TokenRows,
    rope: tuple[Tensor, Tensor],
    arena: Tensor,
) -> None:
    """`Ops.run_layers`."""
    for layer in layers:
        x = run_attention(ops, hidden, layer, rows, rope, arena)
        mlp = layer.weights.mlp
        if isinstance(mlp, Mlp):
            act = ops.gated(x, mlp.gate_up, mlp.gate_up_bias)
            hidden += ops.linear(act, mlp.down, mlp.down_bias)
        else:
            logits = ops.router_logits(x, mlp.router)
            ids, weights = ops.moe_route(logits, mlp.per_token, mlp.renormalize)
            hidden += ops.moe_experts(x, ids, weights, mlp.w13, mlp.w2)


def run_attention(
    ops: Ops,
    hidden: Tensor,
    layer: Layer,
    rows: TokenRows,
    rope: tuple[Tensor, Tensor],
    arena: Tensor,
) -> Tensor:
    """`Ops.run_attention`."""
    weights, shape = layer.weights, layer.shape
    x = ops.rms_norm(hidden, weights.input_norm, shape.eps)
    qkv = ops.linear(x, weights.qkv, weights.qkv_bias)
    out = ops.attend(qkv, layer, rows, rope, arena)
    branch = ops.linear(out, weights.o, weights.o_bias)
    return ops.add_rms_norm(branch, hidden, weights.post_norm, shape.eps)
