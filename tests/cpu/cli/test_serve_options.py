"""Options of `serve` that make no sense are one line and status 2, before anything starts."""

from inspect import signature
from pathlib import Path
from typing import Any, get_args

import pytest
import typer

from c2cserve.cli import main
from c2cserve.cli.serve import serve
from c2cserve.cli.serve_options import address

CATALOG = Path(__file__).parents[3] / "examples" / "specialists" / "catalog.toml"


def numeric_options() -> dict[str, Any]:
    """Name of each parameter that is a number -> its option."""
    found: dict[str, Any] = {}
    for name, parameter in signature(serve).parameters.items():
        kind, *more = get_args(parameter.annotation) or (None,)
        options = [one for one in more if isinstance(one, typer.models.OptionInfo)]
        if options and {int, float} & {kind, *get_args(kind)}:
            found[name] = options[0]
    return found


def test_every_number_has_a_smallest_value() -> None:
    """A negative time, or one that is no number, would only show later, as a server that fails."""
    options = numeric_options()
    assert {"port", "drain_timeout", "pool_bytes", "max_headers"} <= options.keys()
    without = [name for name, one in options.items() if one.min is None and one.parser is None]
    assert without == []


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("port", "65536"), ("port", "-1"), ("drain-timeout", "nan"), ("hang-timeout", "0"),
        ("patience", "nan"), ("pool-bytes", "-5"), ("host", ""), ("host", "[]"),
    ],
)  # fmt: skip
def test_values_that_make_no_sense(
    option: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main.app(["serve", "--catalog", str(CATALOG), f"--{option}={value}"])
    assert end.value.code == 2
    line = capsys.readouterr().err
    assert f"--{option}" in line
    assert len(line.splitlines()) == 1


def test_brackets_of_an_address_are_no_part_of_it() -> None:
    assert address("[::1]") == address("::1") == "::1"
    assert address("localhost") == "localhost"
