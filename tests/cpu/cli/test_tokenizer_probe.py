"""Tokenizers are tried where they can do no harm."""

import json
import shutil
from pathlib import Path

import pytest

from c2cserve.server.text.tokenizer import TokenizerError
from c2cserve.serving.controller import tokenizer_probe
from c2cserve.serving.controller.tokenizer_probe import TokenizerProbe

GOOD = Path(__file__).parents[3] / "examples" / "specialists" / "sorter-llama"


def test_a_good_one_passes_and_each_bad_one_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    probe = TokenizerProbe()
    try:
        probe.check(GOOD, 263)
        with pytest.raises(TokenizerError, match="vocabulary is 10"):
            probe.check(GOOD, 10)
        with pytest.raises(TokenizerError, match="no such file"):
            probe.check(tmp_path, 263)
        bomb = Path(shutil.copytree(GOOD, tmp_path / "bomb"))
        (bomb / "chat_template.jinja").write_text("{{ 'x' * 10**11 }}")
        with pytest.raises(TokenizerError, match="memory"):
            probe.check(bomb, 263)
        monkeypatch.setattr(tokenizer_probe, "_ANSWER_S", 0.5)
        (bomb / "chat_template.jinja").write_text("{{ 9**(9**9) }}")
        with pytest.raises(TokenizerError, match="took more than"):
            probe.check(bomb, 263)
        monkeypatch.undo()
        probe.check(GOOD, 263)
    finally:
        probe.close()


def test_padding_and_truncation_of_the_file_are_not_used(tmp_path: Path) -> None:
    directory = Path(shutil.copytree(GOOD, tmp_path / "m"))
    path = directory / "tokenizer.json"
    fields = json.loads(path.read_text())
    whole = tokenizer_probe.Tokenizer(GOOD).encode("sort: dcba")
    fields["truncation"] = {
        "direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0,
    }  # fmt: skip
    path.write_text(json.dumps(fields))
    assert tokenizer_probe.Tokenizer(directory).encode("sort: dcba") == whole
