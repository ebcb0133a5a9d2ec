"""Where a model's weights go in its segment, and in which order they are loaded. No torch.

Fused as the operators want them: q, k, v rows as one matrix, gate and up rows as one, all experts
of a layer as two stacks. Loaded as a first token needs them: layers in order, then what every token
needs at the end, then experts (taken earlier when a router asks for them), and last an embedding
table that is not also the head: the prompt's few rows are read from the file meanwhile.
"""

from c2cserve.core.tensors import Dtype
from c2cserve.engine.models.config import ConfigError, ModelConfig
from c2cserve.memory.layout import GroupPlan, LayoutPlan, Part, TensorPlan

EMBED = "embed"
HEAD = "head"
NORM = "norm"
OPTIONAL = ("rotary_emb.inv_freq", ".attention.bias", ".masked_bias")


def layer_tensor(layer: int, name: str) -> str:
    return f"layers.{layer}.{name}"


def expert_group(layer: int, expert: int) -> str:
    return f"layers.{layer}.experts.{expert}"


def layer_group(layer: int) -> str:
    return f"layers.{layer}"


def plan_layout(config: ModelConfig, names: "frozenset[str] | None" = None) -> LayoutPlan:
    """`names`: the checkpoint's tensor names, to tell fused experts from single ones and a head
    that is stored although tied; None assumes the published form. Raises ConfigError when they are
    too few for so many layers."""
    if names is not None and config.layers > len(names):
        raise ConfigError(
            f"config.json has {config.layers} layers, the checkpoint {len(names)} tensors"
        )
    builder = _Builder(config, names or frozenset())
    for layer in range(config.layers):
        builder.layer(layer)
    builder.ends()
    plan = LayoutPlan(
        tuple(builder.tensors), (*builder.groups, *builder.expert_groups, *builder.last), OPTIONAL
        + (("lm_head.weight",) if config.tied else ()),
    )  # fmt: skip
    plan.check()
    return plan


class _Builder:
    def __init__(self, config: ModelConfig, names: frozenset[str]) -> None:
        self.config = config
        self.names = names
        self.tensors: list[TensorPlan] = []
        self.groups: list[GroupPlan] = []
        self.expert_groups: list[GroupPlan] = []
        self.last: list[GroupPlan] = []
        self._parts: list[Part] = []

    def _tensor(
        self, name: str, shape: tuple[int, ...], sources: list[tuple[str, tuple[int, ...]]],
        *, starts_layer: bool = False,
    ) -> None:  # fmt: skip
        """A tensor made of whole checkpoint tensors, one after another."""
        dtype: Dtype = self.config.dtype
        self.tensors.append(TensorPlan(name, shape, dtype, starts_layer))
        offset = 0
        for source, source_shape in sources:
            part = Part(source, source_shape, name, offset)
            self._parts.append(part)
            offset += part.elements

    def _group(self, name: str) -> GroupPlan:
        group = GroupPlan(name, tuple(self._parts))
        self._parts.clear()
        return group

    def layer(self, layer: int) -> None:
        c, prefix = self.config, f"model.layers.{layer}"
        q, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim

        def put(name: str, shape: tuple[int, ...], *sources: tuple[str, tuple[int, ...]]) -> None:
            full = [(f"{prefix}.{source}", of) for source, of in sources]
            first = name == "input_norm"
            self._tensor(layer_tensor(layer, name), shape, full, starts_layer=first)

        put("input_norm", (c.hidden,), ("input_layernorm.weight", (c.hidden,)))
        attention = [("self_attn.q_proj", q), ("self_attn.k_proj", kv), ("self_attn.v_proj", kv)]
        put("qkv", (q + 2 * kv, c.hidden), *((f"{n}.weight", (r, c.hidden)) for n, r in attention))
        if c.qkv_bias:
            put("qkv_bias", (q + 2 * kv,), *((f"{n}.bias", (r,)) for n, r in attention))
        if c.qk_norm:
            put("q_norm", (c.head_dim,), ("self_attn.q_norm.weight", (c.head_dim,)))
            put("k_norm", (c.head_dim,), ("self_attn.k_norm.weight", (c.head_dim,)))
        put("o", (c.hidden, q), ("self_attn.o_proj.weight", (c.hidden, q)))
        if c.o_bias:
            put("o_bias", (c.hidden,), ("self_attn.o_proj.bias", (c.hidden,)))
        put("post_norm", (c.hidden,), ("post_attention_layernorm.weight", (c.hidden,)))
        if c.sparse(layer):
            self._sparse(layer, prefix)
            return
        inner = c.intermediate
        rows = ("mlp.gate_proj", "mlp.up_proj")
        put("gate_up", (2 * inner, c.hidden), *((f"{n}.weight", (inner, c.hidden)) for n in rows))
        put("down", (c.hidden, inner), ("mlp.down_proj.weight", (c.hidden, inner)))
        if c.mlp_bias:
            put("gate_up_bias", (2 * inner,), *((f"{n}.bias", (inner,)) for n in rows))
            put("down_bias", (c.hidden,), ("mlp.down_proj.bias", (c.hidden,)))
        self.groups.append(self._group(layer_group(layer)))

    def _sparse(self, layer: int, prefix: str) -> None:
        c, moe = self.config, self.config.moe
        assert moe is not None
        block = f"{prefix}.block_sparse_moe" if c.arch == "mixtral" else f"{prefix}.mlp"
        if f"{prefix}.mlp.gate.weight" in self.names:
            block = f"{prefix}.mlp"
        router = layer_tensor(layer, "router")
        self._tensor(
            router, (moe.experts, c.hidden), [(f"{block}.gate.weight", (moe.experts, c.hidden))]
        )
        self.groups.append(self._group(layer_group(layer)))
        inner = moe.intermediate
        w13, w2 = layer_tensor(layer, "w13"), layer_tensor(layer, "w2")
        self.tensors.append(TensorPlan(w13, (moe.experts, 2 * inner, c.hidden), c.dtype))
        self.tensors.append(TensorPlan(w2, (moe.experts, c.hidden, inner), c.dtype))
        for expert in range(moe.experts):
            parts = self._expert(block, expert, w13, w2, inner)
            self.expert_groups.append(GroupPlan(expert_group(layer, expert), parts))

    def _expert(self, block: str, expert: int, w13: str, w2: str, inner: int) -> tuple[Part, ...]:
        """One expert out of its own tensors, or out of stacks of all of them."""
        c = self.config
        assert c.moe is not None
        size = inner * c.hidden
        fused = f"{block}.experts.gate_up_proj"
        if fused in self.names:
            count = c.moe.experts
            up, down = (count, 2 * inner, c.hidden), (count, c.hidden, inner)
            at13, at2 = expert * 2 * size, expert * size
            return (
                Part(fused, up, w13, at13, at13, 2 * size),
                Part(f"{block}.experts.down_proj", down, w2, at2, at2, size),
            )
        mixtral = c.arch == "mixtral"
        gate, up, down = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
        one = f"{block}.experts.{expert}"
        return (
            Part(f"{one}.{gate}.weight", (inner, c.hidden), w13, expert * 2 * size),
            Part(f"{one}.{up}.weight", (inner, c.hidden), w13, expert * 2 * size + size),
            Part(f"{one}.{down}.weight", (c.hidden, inner), w2, expert * size),
        )

    def ends(self) -> None:
        """Final norm, head and embedding table."""
        c = self.config
        self._tensor(NORM, (c.hidden,), [("model.norm.weight", (c.hidden,))], starts_layer=True)
        table = (c.vocab, c.hidden)
        if c.tied:
            self._tensor(EMBED, table, [("model.embed_tokens.weight", table)])
            self.groups.append(self._group(HEAD))
            return
        self._tensor(HEAD, table, [("lm_head.weight", table)])
        self.groups.append(self._group(HEAD))
        self._tensor(EMBED, table, [("model.embed_tokens.weight", table)])
        self.last.append(self._group(EMBED))
