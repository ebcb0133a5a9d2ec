"""Checkpoints in float32 on servers whose slices compute in 16 bits."""

import json
import shutil
from functools import partial
from pathlib import Path

import pytest

from c2cserve.catalog.roots import ModelRoots
from c2cserve.memory.pool import Pool
from c2cserve.runtime.gateway import Refused
from c2cserve.serving.controller.catalog_host import CatalogHost

SOURCE = Path(__file__).parents[3] / "examples" / "specialists" / "sorter-llama"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "m"
    shutil.copytree(SOURCE, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "dtype": "float32"}))
    return folder


def dtype_of(folder: Path, dtype: str, *, half_only: bool) -> str:
    """The dtype that a server would keep the model in."""
    make_pool = partial(Pool, "half", folder.parent, 1 << 30)
    roots = ModelRoots([folder.parent])
    host = CatalogHost(
        folder.parent, roots, make_pool, lambda _: None, 1 << 30, half_only=half_only
    )
    try:
        return host.prepare({"id": "m", "path": str(folder), "dtype": dtype}).dtype
    finally:
        host.close()


@pytest.mark.parametrize(
    ("dtype", "half_only", "kept"),
    [("auto", True, "bfloat16"), ("auto", False, "float32"), ("float16", True, "float16"),
     ("float32", False, "float32")],
)  # fmt: skip
def test_weights_are_kept_in_what_the_slices_run(
    checkpoint: Path, dtype: str, half_only: bool, kept: str
) -> None:
    assert dtype_of(checkpoint, dtype, half_only=half_only) == kept


def test_a_wish_for_float32_is_refused_where_slices_do_not_run_it(checkpoint: Path) -> None:
    with pytest.raises(Refused) as caught:
        dtype_of(checkpoint, "float32", half_only=True)
    assert caught.value.status == 400
    assert "leave `dtype` out" in caught.value.reason
