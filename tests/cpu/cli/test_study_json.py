"""The JSON of a study says what is needed to judge it."""

import json
from pathlib import Path

import pytest

from c2cserve.cli.main import app


def test_a_study_says_when_where_and_of_what_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "requests.csv"
    trace.write_text("t_s,model\n" + "".join(f"{400 * i},a\n" for i in range(20)))
    with pytest.raises(SystemExit, match="0"):
        app(["simulate", "--study", "gentd26", "--trace", str(trace), "--json", "-"])
    found = json.loads(capsys.readouterr().out)
    assert found["date"]
    assert found["machine"]["cpu"]
    assert "commit" in found
    parameters = found["parameters"]
    assert parameters.pop("policies")
    assert parameters == {"study": "gentd26", "trace": "requests.csv", "seed": 0, "quick": False}
    rates = found["figures"][0]["series"]["a"]
    assert found["data"]["gentd26_rates"]["a"] == {str(x): y for x, y in rates}
    assert found["data"]["hours"] == 3
