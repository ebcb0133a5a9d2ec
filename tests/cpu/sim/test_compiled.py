"""Compiled policies: which build is used, and that it decides the same to the bit."""

import filecmp
import importlib
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from c2cserve.sim import compiled

HERE = Path(__file__).parent
WORLDS = 60


@pytest.fixture
def built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, list[str]], None]:
    """Makes the manifest of a build, which is then chosen."""

    def make(fingerprint: str, modules: list[str]) -> None:
        manifest = {"fingerprint": fingerprint, "modules": {name: f"{name}.so" for name in modules}}
        (tmp_path / "manifest.json").write_text(json.dumps(manifest))

    monkeypatch.setenv("C2CSERVE_COMPILED", str(tmp_path))
    return make


def test_without_a_build_the_sources_run(built: object, caplog: pytest.LogCaptureFixture) -> None:
    assert not compiled.use()
    assert compiled.status().startswith("pure Python: not built")
    assert not caplog.records


def test_it_is_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("C2CSERVE_COMPILED", "0")
    assert not compiled.use()
    assert compiled.status() == "pure Python: C2CSERVE_COMPILED=0"


def test_a_build_of_other_sources_is_not_used_and_that_is_said(
    built: Callable[[str, list[str]], None], caplog: pytest.LogCaptureFixture
) -> None:
    built("other", ["c2cserve.sim.world.loop"])
    with caplog.at_level(logging.WARNING):
        assert not compiled.use()
    assert "built from other sources" in caplog.text
    assert "built from other sources" in compiled.status()


def test_a_program_that_runs_the_sources_goes_on_with_them(
    built: Callable[[str, list[str]], None],
) -> None:
    importlib.import_module("c2cserve.sim.world.loop")
    built(compiled.fingerprint(), ["c2cserve.sim.world.loop"])
    assert compiled.status() == "compiled (1 modules)"
    before = list(sys.meta_path)
    assert not compiled.use()
    assert sys.meta_path == before


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(find_spec("mypyc") is None, reason="needs mypyc: pip install mypy")
def test_compiled_policies_do_the_same_to_the_bit(tmp_path: Path) -> None:
    """Every tick's events and actions, and the report, of random worlds of all presets."""
    compiled.build(tmp_path / "build")
    for kind, build in (("pure", "0"), ("compiled", str(tmp_path / "build"))):
        (tmp_path / kind).mkdir()
        command = [
            sys.executable, str(HERE / "record_worlds.py"), str(tmp_path / kind), "0", str(WORLDS),
            kind,
        ]  # fmt: skip
        subprocess.run(command, check=True, env={**os.environ, "C2CSERVE_COMPILED": build})
    files = sorted(path.name for path in (tmp_path / "pure").iterdir())
    assert len(files) == 2 * WORLDS
    same, *different = filecmp.cmpfiles(
        tmp_path / "pure", tmp_path / "compiled", files, shallow=False
    )
    assert different == [[], []]
    assert len(same) == len(files)
