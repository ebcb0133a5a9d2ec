"""What an added model may be made of: files under the roots, wherever links lead."""

import os
from pathlib import Path

import pytest

from c2cserve.catalog.entry import CatalogError
from c2cserve.catalog.file import load_catalog
from c2cserve.catalog.parse import parse_entry
from c2cserve.catalog.roots import ModelRoots, roots_of
from c2cserve.files.seal import Seal, seal_files


def sealed(path: Path) -> Seal:
    return seal_files([path])


@pytest.fixture
def inside(tmp_path: Path) -> Path:
    path = tmp_path / "models"
    path.mkdir()
    (path / "config.json").write_text("{}")
    (tmp_path / "secret.json").write_text('{"secret": 1}')
    return path


def test_a_path_lies_under_a_root(inside: Path, tmp_path: Path) -> None:
    roots = ModelRoots([inside])
    for fine in (inside, inside / "a", inside / "a" / ".." / "b"):
        roots.check_path(str(fine), fine.resolve())
    for outside in (tmp_path, tmp_path / "models2", Path("/"), Path("/etc/passwd")):
        with pytest.raises(CatalogError, match="--model-root"):
            roots.check_path(str(outside), outside)


def test_a_root_may_be_a_link(inside: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(inside)
    roots = ModelRoots([tmp_path / "link"])
    roots.check_path("x", (tmp_path / "link" / "a").resolve())
    roots.check_files(sealed(tmp_path / "link" / "config.json"))


def test_a_link_to_a_file_outside_is_refused(inside: Path, tmp_path: Path) -> None:
    roots = ModelRoots([inside])
    (inside / "own.json").symlink_to("config.json")
    roots.check_files(sealed(inside / "own.json"))
    roots.check_files(sealed(inside / "none.json"))
    (inside / "its.json").symlink_to("../secret.json")
    (inside / "sub").symlink_to("..")
    for name in ("its.json", "sub/secret.json"):
        with pytest.raises(CatalogError, match="leads out of the model roots"):
            roots.check_files(sealed(inside / name))


def test_a_link_that_is_exchanged_after_the_check_is_of_no_use(
    inside: Path, tmp_path: Path
) -> None:
    """The file that was sealed is the one that is judged, and the only one that is served."""
    roots = ModelRoots([inside])
    link = inside / "its.json"
    link.symlink_to("../secret.json")
    seal = sealed(link)
    link.unlink()
    link.symlink_to("config.json")
    with pytest.raises(CatalogError):
        roots.check_files(seal)
    seal = sealed(link)
    roots.check_files(seal)
    os.replace(tmp_path / "secret.json", inside / "other.json")
    link.unlink()
    link.symlink_to("other.json")
    assert seal.changed() is not None


def test_a_hub_s_cache(inside: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of a snapshot are links to the blobs beside it."""
    cache = tmp_path / "hub"
    snapshot = cache / "models--org--m" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    blob = cache / "models--org--m" / "blobs" / "1"
    blob.parent.mkdir()
    blob.write_text("{}")
    (snapshot / "config.json").symlink_to("../../blobs/1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    roots = ModelRoots([inside])
    with pytest.raises(CatalogError):
        roots.check_files(sealed(snapshot / "config.json"))
    roots.with_hub().check_files(sealed(snapshot / "config.json"))


def test_roots_of_a_catalogue(tmp_path: Path) -> None:
    home = tmp_path / "etc"
    home.mkdir()
    snapshot = tmp_path / "hub" / "models--org--m" / "snapshots" / "abc"
    for path in (home / "own", tmp_path / "a", snapshot):
        path.mkdir(parents=True)
    catalog = home / "catalog.toml"
    catalog.write_text(
        f'[[models]]\nid = "a"\npath = "{tmp_path}/a"\n[[models]]\nid = "h"\npath = "{snapshot}"\n'
    )
    loaded = load_catalog(catalog, with_files=False)
    roots = roots_of(loaded, [tmp_path / "more"])
    for name in ("etc/own", "a", "a/b", "more/x", "hub/models--org--m/blobs"):
        roots.check_path(name, tmp_path / name)
    for name in ("", "b", "hub", "hub/models--org--n"):
        with pytest.raises(CatalogError):
            roots.check_path(name, tmp_path / name)
    assert roots.trusts(dict(loaded.raw[0]))
    assert not roots.trusts({**loaded.raw[0], "id": "other"})


@pytest.mark.parametrize("revision", ["../../x", "a/../b", "/etc", "a//b", ".", "a/", "-x", ""])
def test_a_revision_leads_nowhere(tmp_path: Path, revision: str) -> None:
    with pytest.raises(CatalogError, match="revision"):
        parse_entry({"id": "a", "hub": "org/m", "revision": revision}, tmp_path)


@pytest.mark.parametrize("revision", ["main", "refs/pr/1", "v1.0+cpu", "0" * 40])
def test_revisions(tmp_path: Path, revision: str) -> None:
    entry = parse_entry({"id": "a", "hub": "org/m", "revision": revision}, tmp_path)
    assert entry.revision == revision
