"""Every promise of docs/security.md names a test that there is."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
_REFERENCE = re.compile(r"`([\w/]*\.py)?::(test_\w+)`")


def test_each_promise_has_its_test() -> None:
    rows = 0
    for line in (ROOT / "docs" / "security.md").read_text().splitlines():
        path = ""
        for found in _REFERENCE.finditer(line):
            path = found[1] or path
            source = (ROOT / "tests" / path).read_text()
            assert re.search(rf"^(async )?def {found[2]}\(", source, re.MULTILINE), found[0]
            rows += 1
    assert rows > 30


def test_each_table_of_promises_is_complete() -> None:
    text = (ROOT / "docs" / "security.md").read_text()
    for table in text.split("| promise | test |\n|---|---|\n")[1:]:
        for line in table.partition("\n\n")[0].splitlines():
            assert _REFERENCE.search(line) or "](operations.md#" in line, line
