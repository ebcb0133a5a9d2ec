"""The pages for browsers: their files, and that they need nothing from elsewhere."""

import re
from pathlib import Path

import pytest
from served import Served

from c2cserve.server.dashboard import routes
from c2cserve.server.dashboard.routes import PAGE as DASHBOARD
from c2cserve.server.pages import docs
from c2cserve.server.pages.docs import DOCS
from c2cserve.server.pages.static import BASE, StaticPage

FOLDERS = {
    "/dashboard": (DASHBOARD, Path(routes.__file__).parent / "page"),
    "/docs": (DOCS, Path(docs.__file__).parent / "docs_page"),
}
KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}


@pytest.fixture(params=list(FOLDERS))
def page(request: pytest.FixtureRequest) -> tuple[str, StaticPage, Path]:
    return request.param, *FOLDERS[request.param]


def path_of(name: str, folder: Path) -> Path:
    return BASE if name == BASE.name else folder / name


def test_a_page_and_its_files(served: Served, page: tuple[str, StaticPage, Path]) -> None:
    path, files, folder = page
    first = served.http.get(path)
    assert first.status_code == 200
    assert first.headers["content-type"] == "text/html; charset=utf-8"
    assert {one.name for one in folder.iterdir()} | {BASE.name} == set(files.names)
    for name in files.names:
        answer = served.http.get(f"{path}/{name}")
        assert answer.status_code == 200
        assert answer.headers["content-type"] == f"{KINDS[Path(name).suffix]}; charset=utf-8"
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert "frame-ancestors 'none'" in answer.headers["content-security-policy"]
        assert answer.content == path_of(name, folder).read_bytes()


@pytest.mark.parametrize(
    "name", ["none.js", "..%2Fstate.py", "..%2f..%2fapp.py", "", "__init__.py"]
)
def test_no_other_file_is_served(
    served: Served, page: tuple[str, StaticPage, Path], name: str
) -> None:
    assert served.http.get(f"{page[0]}/{name}").status_code == 404


def test_a_page_needs_nothing_from_elsewhere(page: tuple[str, StaticPage, Path]) -> None:
    """Neither another host nor a file that is not served; and nothing that the policy forbids."""
    _, files, folder = page
    for name in files.names:
        text = path_of(name, folder).read_text()
        assert text.count("\n") <= 400
        addresses = set(re.findall(r"https?://[^\"'\s]+", text))
        assert addresses <= {"http://www.w3.org/2000/svg"}
        for target in re.findall(r"(?:from|src=|href=) ?\"([^\"#]+)\"", text):
            own = target.rpartition("/")[2] in files.names
            assert own or target in ("data:,", "/openapi.json"), target
        assert not re.search(r"innerHTML|\son\w+=\"|\sstyle=\"|eval\(", text)


def test_each_colour_has_one_definition() -> None:
    """And each that is used has one."""
    sheets = [BASE, *(one for _, folder in FOLDERS.values() for one in folder.glob("*.css"))]
    texts = [sheet.read_text() for sheet in sheets]
    defined = [name for text in texts for name in re.findall(r"(--[\w-]+):", text)]
    assert len(defined) == len(set(defined))
    for (_, folder), own in zip(FOLDERS.values(), texts[1:], strict=True):
        known = set(re.findall(r"(--[\w-]+):", texts[0] + own))
        used = " ".join(one.read_text() for one in [BASE, *folder.iterdir()])
        assert set(re.findall(r"var\((--[\w-]+)\)", used)) <= known
