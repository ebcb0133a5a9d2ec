"""Modules as mypyc compiles them best.

It knows no decorator but `dataclass` itself, and compiles only constructors that are written out.
Those that `dataclass` makes stay Python, and each attribute that they set is a call. The loops make
dozens of such objects for each request.

A compiled value cannot be pickled, as `plan` does to send it to another process. So values say how
they are made.

A value never leads back to itself, so Python's collector of cycles need not know of it.

Only the sources check that what is zipped has one length: mypyc compiles no `zip` with options.

A name of a module is looked up in a dictionary wherever it is read. Constants are final, so that
numbers stand where they are read, infinity too, and others are variables of C.
"""

import ast
from collections import Counter
from math import inf

_VALUE = "@dataclass(slots=True, unsafe_hash=True)\n"
"""What `core.value.value` and frozen dataclasses are, but for checks of assignments."""
_INFINITY = "1e999"
"""A literal that is read as infinity."""
_IMPORTS = """from dataclasses import dataclass
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    from mypy_extensions import mypyc_attr
"""


def written_out(text: str) -> str:
    """Return a module with the constructors of its dataclasses written out, and final constants."""
    text = text.replace(", strict=True)", ")")
    text = text.replace("@value\n", "@mypyc_attr(acyclic=True)\n" + _VALUE)
    text = text.replace("@dataclass(frozen=True, slots=True)\n", _VALUE)
    text = text.replace("from c2cserve.core.value import value\n", _IMPORTS)
    lines = _with_final_constants(text)
    classes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef)]
    for node in sorted(classes, key=lambda one: one.lineno, reverse=True):
        if _is_plain(node):
            assert node.end_lineno is not None
            lines[node.end_lineno : node.end_lineno] = _constructor(node)
    return "\n".join(lines) + "\n"


def _with_final_constants(text: str) -> list[str]:
    """Return the lines of a module. Their number is the same."""
    lines, body = text.splitlines(), ast.parse(text).body
    assigned = [
        one for one in body
        if isinstance(one, ast.Assign) and len(one.targets) == 1
        and isinstance(one.targets[0], ast.Name)
    ]  # fmt: skip
    times = Counter(ast.unparse(one.targets[0]) for one in assigned)
    changed: dict[int, str] = {}
    for one in assigned:
        name, line = ast.unparse(one.targets[0]), lines[one.lineno - 1]
        if name.isupper() and times[name] == 1 and not ast.unparse(one.value).startswith("TypeVar"):
            number = _number(one.value)
            rest = line.removeprefix(f"{name} =")
            changed[one.lineno - 1] = f"{name}: _Final ={rest}"
            if number is not None:
                literal = _INFINITY if number == inf else repr(number)
                changed[one.lineno - 1] = f"{name}: _Final = {literal}"
    for one in body:
        if isinstance(one, ast.ImportFrom) and one.module == "math":
            names = [alias.name for alias in one.names if alias.name != "inf"]
            if len(names) < len(one.names):
                kept = f"from math import {', '.join(names)}; " if names else ""
                changed[one.lineno - 1] = f"{kept}inf: _Final = {_INFINITY}"
    if changed:
        first = min(changed)
        changed[first] = f"from typing import Final as _Final; {changed[first]}"
    return [changed.get(index, line) for index, line in enumerate(lines)]


def _number(value: ast.expr) -> int | float | None:
    """Return the value of an expression of numbers alone; None if it is another one."""
    if ast.unparse(value) == "float('inf')":
        return inf
    if any(isinstance(one, ast.Name | ast.Call | ast.Attribute) for one in ast.walk(value)):
        return None
    found = eval(compile(ast.Expression(value), "", "eval"), {})
    return found if isinstance(found, int | float) and not isinstance(found, bool) else None


def _is_plain(node: ast.ClassDef) -> bool:
    """Return whether a class is a dataclass that inherits no fields."""
    decorated = any(ast.unparse(one).startswith("dataclass") for one in node.decorator_list)
    methods = {one.name for one in node.body if isinstance(one, ast.FunctionDef)}
    return decorated and not node.bases and "__init__" not in methods


def _constructor(node: ast.ClassDef) -> list[str]:
    parameters, body = ["self"], list[str]()
    for one in node.body:
        if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name):
            parameter, assignment = _field(one, one.target.id)
            parameters += parameter
            body += assignment
        elif isinstance(one, ast.FunctionDef) and one.name == "__post_init__":
            body.append("self.__post_init__()")
    indent = " " * node.body[0].col_offset
    head = f"{indent}def __init__({', '.join(parameters)}) -> None:"
    written = ["", head, *(f"{indent}    {line}" for line in body or ["pass"])]
    if any(ast.unparse(one) == _VALUE.strip("@\n") for one in node.decorator_list):
        given = "".join(f"self.{one.partition(':')[0]}, " for one in parameters[1:])
        head = f"{indent}def __reduce__(self) -> tuple[object, ...]:"
        written += ["", head, f"{indent}    return type(self), ({given})"]
    return written


def _field(one: ast.AnnAssign, name: str) -> tuple[list[str], list[str]]:
    """Return a field's parameter and assignment, if it has them."""
    kind, default = ast.unparse(one.annotation), one.value
    if default is None:
        return [f"{name}: {kind}"], [f"self.{name} = {name}"]
    if not (isinstance(default, ast.Call) and ast.unparse(default.func) == "field"):
        return [f"{name}: {kind} = {ast.unparse(default)}"], [f"self.{name} = {name}"]
    options = {word.arg: word.value for word in default.keywords}
    if "init" in options:
        return [], []  # `__post_init__` sets it
    if "default" in options:
        return [f"{name}: {kind} = {ast.unparse(options['default'])}"], [f"self.{name} = {name}"]
    factory = options["default_factory"]
    plain = isinstance(factory, ast.Lambda)
    made = ast.unparse(factory.body) if plain else f"{ast.unparse(factory)}()"
    value = f"{made} if {name} is None else {name}"
    if isinstance(one.annotation, ast.Constant):  # a forward reference
        return [f"{name}: {f'{one.annotation.value} | None'!r} = None"], [f"self.{name} = {value}"]
    return [f"{name}: {kind} | None = None"], [f"self.{name} = {value}"]
