"""The example in docs/simulator.md is what its command prints."""

import re
import shlex

import pytest
from documents import ROOT

from c2cserve.cli.main import app

_PAGE = ROOT / "docs" / "simulator.md"


@pytest.mark.slow
def test_the_documents_example_is_the_plans_output(capsys: pytest.CaptureFixture[str]) -> None:
    text = _PAGE.read_text()
    command = next(line for line in text.splitlines() if line.startswith("c2cserve plan "))
    asked = shlex.split(command)[1:]
    with pytest.raises(SystemExit) as ended:
        app([*asked, "--gpu-month", "2500"])
    assert ended.value.code == 0
    said = capsys.readouterr().out
    table, answer = text.split("| models | seeds |")[1].split("```text\n", 1)
    documented = [_cells(line) for line in table.splitlines() if re.match(r"\| \W*\d", line)]
    printed = [_cells(line)[1:] for line in said.splitlines() if line.startswith("│ gh200")]
    assert documented == printed
    assert "".join(answer.split("```")[0].split()) in "".join(said.split())


def _cells(line: str) -> list[str]:
    return re.sub(r"[\s*]", "", line).replace("│", "|").strip("|").split("|")
