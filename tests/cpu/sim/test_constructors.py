"""Dataclasses as they are compiled: a plain constructor does what the decorator says."""

import ast
from collections.abc import Callable
from math import inf
from pathlib import Path
from typing import Any

from c2cserve.sim.compiled import compiled_files
from c2cserve.sim.constructors import written_out

TEXT = '''
from collections import deque
from dataclasses import dataclass, field
from c2cserve.core.value import value

@value
class Part:
    id: int
    lane: str = "resident"

    def __post_init__(self) -> None:
        assert self.id

@dataclass(slots=True, eq=False)
class Model:
    part: "Part"
    names: dict[str, "Part"] = field(default_factory=dict[str, "Part"])
    last: "deque[int]" = field(default_factory=lambda: deque(maxlen=2))
    size: int = field(init=False)

    def __post_init__(self) -> None:
        self.size = self.part.id

@dataclass(frozen=True, slots=True)
class Empty:
    """Nothing."""
'''


def _no_attribute(**_: bool) -> Callable[[type], type]:
    """Stands for a decorator that only mypyc reads."""
    return lambda kind: kind


def test_constructors_do_what_the_decorator_says() -> None:
    text = written_out(TEXT)
    names: dict[str, Any] = {"mypyc_attr": _no_attribute}
    exec(text, names)
    part, model = names["Part"](3), names["Model"]
    assert part == names["Part"](id=3, lane="resident")
    assert hash(part) == hash(names["Part"](3))
    one, other = model(part), model(part, {"a": part})
    assert (one.size, one.names, other.names) == (3, {}, {"a": part})
    assert one.names is not model(part).names
    assert one.last.maxlen == 2
    assert names["Empty"]() == names["Empty"]()


def test_all_dataclasses_that_are_compiled_have_constructors_written_out() -> None:
    """Those that inherit fields are left as they are: there is none in these files."""
    package = Path(written_out.__code__.co_filename).parents[1]
    for name in compiled_files():
        for node in ast.walk(ast.parse(written_out((package / name).read_text()))):
            if isinstance(node, ast.ClassDef) and "@dataclass" in "".join(
                f"@{ast.unparse(one)}" for one in node.decorator_list
            ):
                methods = {one.name for one in node.body if isinstance(one, ast.FunctionDef)}
                assert "__init__" in methods, f"{name}: {node.name}"


def test_constants_of_a_module_are_final_and_have_their_values() -> None:
    text = (
        '"""A module."""\n\n_SIZE = 64 << 20\n"""Bytes."""\n_SHARE = 1 / 32\nNAMES = ("a", "b")\n'
        '_NEVER = float("inf")\nfrom math import ceil, inf\n'
    )
    names: dict[str, object] = {}
    exec(found := written_out(text), names)
    assert (names["_SIZE"], names["_SHARE"], names["NAMES"]) == (64 << 20, 1 / 32, ("a", "b"))
    assert "_SIZE: _Final = 67108864" in found
    assert (names["_NEVER"], names["inf"]) == (inf, inf)
    assert "NAMES: _Final = (" in found
    assert "from math import ceil; inf: _Final = 1e999" in found


def test_type_variables_and_targets_of_several_names_are_left_alone() -> None:
    for text in ("T = TypeVar('T')\n", "A, B = 1, 2\n"):
        assert written_out(text) == text


def test_a_name_that_is_assigned_twice_is_not_final() -> None:
    assert "Final" not in written_out("LEVEL = 1\nLEVEL = 2\n")


def test_a_value_says_how_it_is_made() -> None:
    names: dict[str, Any] = {"mypyc_attr": _no_attribute}
    exec(written_out(TEXT), names)
    made = names["Part"](7, "streaming")
    kind, fields = made.__reduce__()
    assert (kind, fields) == (names["Part"], (7, "streaming"))
    assert kind(*fields) == made
    assert names["Empty"]().__reduce__()[1] == ()
