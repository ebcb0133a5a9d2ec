"""Dataclasses as they are compiled: a plain constructor does what the decorator says."""

import ast
from pathlib import Path

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


def test_constructors_do_what_the_decorator_says() -> None:
    text = written_out(TEXT)
    names: dict[str, type] = {}
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
