"""Models by their shape: the figures of a published architecture that a simulation needs."""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any

from c2cserve.core.model import ModelSpec
from c2cserve.core.request import BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class Shape:
    """One architecture; `parameters` as published. `table`: its name in measured tables."""

    name: str
    parameters: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    max_context: int
    experts: int = 0
    experts_per_token: int = 0
    expert_parameters: int = 0
    """Parameters of one expert in all layers."""
    table: str = ""
    item_bytes: int = 2
    """Bytes of a weight, and of a number in KV; 2: bfloat16 or float16."""
    vocabulary_parameters: int = 0
    """Parameters of one embedding matrix; 0: it is not known, and counted as layers'."""
    tied: bool = True
    """One such matrix is input and output. Else there are two."""

    @property
    def active_parameters(self) -> int:
        """Parameters that a token is multiplied with."""
        return self.parameters - (self.experts - self.experts_per_token) * self.expert_parameters

    @property
    def layer_parameters(self) -> int:
        return self.parameters - self.vocabulary_parameters * (1 if self.tied else 2)

    @property
    def kv_token_bytes(self) -> int:
        return 2 * self.layers * self.kv_heads * self.head_dim * self.item_bytes

    @property
    def weight_bytes(self) -> int:
        return self.parameters * self.item_bytes

    def spec(self, model: str) -> ModelSpec:
        return ModelSpec(
            id=model,
            weight_bytes=self.weight_bytes,
            layers=self.layers,
            kv_block_bytes=self.kv_token_bytes * BLOCK_TOKENS,
            max_context=self.max_context,
            parameters=self.parameters,
            experts=self.experts,
            experts_per_token=self.experts_per_token,
            expert_bytes=self.expert_parameters * self.item_bytes,
        )


@dataclass(frozen=True, slots=True)
class SimModel:
    spec: ModelSpec
    shape: Shape


class UnknownShape(ValueError):
    """There is no such shape; the message lists those there are."""


@cache
def shapes() -> dict[str, Shape]:
    """Return the packaged shapes by name."""
    text = (files("c2cserve.sim") / "data" / "models.toml").read_text()
    return {name: _shape(name, row) for name, row in tomllib.loads(text).items()}


def _shape(name: str, row: Mapping[str, Any]) -> Shape:
    return Shape(name=name, **{key: value for key, value in row.items() if key != "source"})


def shape_of(name: str) -> Shape:
    """Return a packaged shape. Raises UnknownShape."""
    if name not in shapes():
        raise UnknownShape(f"no model shape {name!r}; there are: {', '.join(shapes())}")
    return shapes()[name]


def catalogue(text: str, keep_warm_s: float = 0.0) -> list[SimModel]:
    """Make models from terms `SHAPE*COUNT`, such as `llama-2-7b*64,llama-2-13b*8`.

    Their ids are `SHAPE/NUMBER`. Raises UnknownShape, ValueError."""
    models: list[SimModel] = []
    for term in text.split(","):
        name, _, number = term.strip().partition("*")
        shape = shape_of(name)
        try:
            copies = int(number) if number else 1
        except ValueError as error:
            raise ValueError(f"{term!r} is not SHAPE*COUNT") from error
        if copies < 1:
            raise ValueError(f"{term!r}: COUNT is at least 1")
        first = sum(model.shape is shape for model in models)
        models += [_model(shape, first + index, keep_warm_s) for index in range(copies)]
    return models


def _model(shape: Shape, number: int, keep_warm_s: float) -> SimModel:
    return SimModel(replace(shape.spec(f"{shape.name}/{number}"), keep_warm_s=keep_warm_s), shape)


def interleaved(models: Sequence[SimModel]) -> list[SimModel]:
    """Mix the sizes: a trace's most popular models come first, and must not all be of one size."""
    by_shape: dict[str, list[SimModel]] = {}
    for model in models:
        by_shape.setdefault(model.shape.name, []).append(model)
    ranked = [
        ((index + 0.5) / len(line), model.spec.id, model)
        for line in by_shape.values()
        for index, model in enumerate(line)
    ]
    return [model for _, _, model in sorted(ranked, key=lambda entry: entry[:2])]
