"""The client matrix in the docs is of the clients that its command runs, and says all is well."""

import matrix


def test_the_page_has_a_row_for_each_client() -> None:
    found = matrix.TABLE.search(matrix.PAGE.read_text())
    assert found is not None
    rows = [line.split("|")[1:-1] for line in found.group().splitlines()]
    cells = [[cell.strip() for cell in row] for row in rows]
    assert cells[0] == ["client", "version", *matrix.FEATURES]
    assert [row[0] for row in cells[2:]] == [one.name for one in matrix.CLIENTS]
    for row in cells[2:]:
        assert "yes" in row[2:]
        assert set(row[2:]) <= {"yes", ""}, f"{row[0]} does not work"


def test_every_client_has_its_program() -> None:
    for one in matrix.CLIENTS:
        assert (matrix.PROGRAMS / one.program).is_file()


def test_what_does_not_work_is_shown() -> None:
    client = matrix.CLIENTS[0]
    outcome = matrix.Outcome(client, "1.0", {"chat": "", "errors": "it raised"})
    (row,) = matrix.table([outcome]).splitlines()[2:]
    assert row == f"| {client.name} | 1.0 |  | yes |  |  |  |  |  |  |  | no |"
