"""Dataclasses for mypyc, which knows no decorator but `dataclass` itself, and compiles only
constructors that are written out. Those that `dataclass` makes stay Python, and each attribute that
they set is a call. The loops make dozens of such objects for each request."""

import ast

_VALUE = "@dataclass(slots=True, unsafe_hash=True)\n"
"""What `core.value.value` and frozen dataclasses are, but for checks of assignments."""


def written_out(text: str) -> str:
    """Return a module with the constructors of its dataclasses written out."""
    text = text.replace("@value\n", _VALUE).replace("@dataclass(frozen=True, slots=True)\n", _VALUE)
    text = text.replace(
        "from c2cserve.core.value import value\n", "from dataclasses import dataclass\n"
    )
    lines = text.splitlines()
    classes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef)]
    for node in sorted(classes, key=lambda one: one.lineno, reverse=True):
        if _is_plain(node):
            assert node.end_lineno is not None
            lines[node.end_lineno : node.end_lineno] = _constructor(node)
    return "\n".join(lines) + "\n"


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
    return ["", head, *(f"{indent}    {line}" for line in body or ["pass"])]


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
    factory = options["default_factory"]
    plain = isinstance(factory, ast.Lambda)
    made = ast.unparse(factory.body) if plain else f"{ast.unparse(factory)}()"
    value = f"{made} if {name} is None else {name}"
    if isinstance(one.annotation, ast.Constant):  # a forward reference
        return [f"{name}: {f'{one.annotation.value} | None'!r} = None"], [f"self.{name} = {value}"]
    return [f"{name}: {kind} | None = None"], [f"self.{name} = {value}"]
