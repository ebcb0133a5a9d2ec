"""FlashInfer's modules: built ahead under its version, found there or where FlashInfer has its own,
and done without where they are not."""

import json
import logging
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from c2cserve.kernels.gpu.aot import flash_modules
from c2cserve.kernels.gpu.aot.compiler import BuildError
from c2cserve.kernels.gpu.aot.flash_modules import MODULES, FlashKind
from c2cserve.kernels.gpu.attention.flash_library import FlashInfer

KIND = MODULES[0]
CPU = torch.device("cpu")


# ---- building ------------------------------------------------------------------------------------


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[dict[str, str]]:
    """Instead of FlashInfer and compilers: what each of its processes was told by environment."""
    told: list[dict[str, str]] = []
    top = tmp_path / "cuda"
    for file in ("bin/nvcc", "include/cuda.h", "lib/libcudart.so.13"):
        (top / file).parent.mkdir(parents=True, exist_ok=True)
        (top / file).touch()

    def run(command: list[str], what: str, environment: dict[str, str]) -> str:
        if "--dryrun" in command:
            return f"#$ _SPACE_= \n#$ TOP={top}/bin/..\n"
        if "-shared" in command:
            Path(command[-1]).touch()
            return ""
        *_, dtype, head_dim, windowed, folder = command
        assert (Path(environment["CUDA_HOME"]) / "lib64/libcudart.so").exists()
        assert (Path(environment["CUDA_HOME"]) / "include/cuda.h").exists()
        module = Path(folder) / f"paged_{dtype}_{head_dim}_{windowed}"
        module.mkdir(parents=True)
        (module / f"{module.name}.so").write_text("half of a module")
        told.append(environment)
        return ""

    monkeypatch.setattr(flash_modules, "_run", run)
    monkeypatch.setattr(flash_modules, "find_nvcc", lambda: str(top / "bin/nvcc"))
    monkeypatch.setattr(flash_modules, "nvcc_version", lambda nvcc: "13.0")
    return told


def test_build_then_build_again(compiled: list[dict[str, str]], tmp_path: Path) -> None:
    folder, heard = tmp_path / "kernels", list[FlashKind]()
    assert flash_modules.build(folder, "0.7.2", done=heard.append) == list(MODULES) == heard
    assert flash_modules.check(folder, "0.7.2") == []
    there = flash_modules.modules_folder(folder, "0.7.2")
    record = json.loads((there / f"{KIND.name}.json").read_text())
    assert record == {"module": "paged_bfloat16_128_0", "compiler": "13.0"}
    assert (there / record["module"] / f"{record['module']}.so").is_file(), "as FlashInfer looks"
    assert [path.name for path in folder.iterdir()] == [there.name], "nothing is left behind"
    assert flash_modules.build(folder, "0.7.2") == []
    assert flash_modules.build(folder, "0.7.2", force=True) == list(MODULES)


def test_it_is_compiled_for_hopper_and_in_its_own_workspace(
    compiled: list[dict[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHINFER_DISABLE_JIT", "1")
    flash_modules.build(tmp_path / "kernels", "0.7.2", kinds=[KIND])
    (told,) = compiled
    assert told["FLASHINFER_CUDA_ARCH_LIST"] == "9.0a"
    assert told["FLASHINFER_WORKSPACE_BASE"].startswith(str(tmp_path / "kernels"))
    assert "FLASHINFER_DISABLE_JIT" not in told


def test_another_version_builds_its_own(compiled: list[dict[str, str]], tmp_path: Path) -> None:
    flash_modules.build(tmp_path, "0.7.2", kinds=[KIND])
    assert flash_modules.state(tmp_path, KIND, "0.7.2") == "built"
    assert flash_modules.state(tmp_path, KIND, "0.7.3") == "stale"
    assert flash_modules.state(tmp_path, MODULES[1], "0.7.3") == "missing"
    assert flash_modules.check(tmp_path, "0.7.3")[:2] == [
        f"{KIND.name} was built by another FlashInfer than 0.7.3",
        f"{MODULES[1].name} is not built",
    ]
    flash_modules.build(tmp_path, "0.7.3", kinds=[KIND])
    assert flash_modules.clean(tmp_path, "0.7.3") == 1
    assert flash_modules.built(tmp_path, KIND, "0.7.3")
    assert not flash_modules.modules_folder(tmp_path, "0.7.2").exists()
    assert flash_modules.clean(tmp_path, None) == 1


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"module": "gone"}'])
def test_a_spoilt_record_is_no_module(tmp_path: Path, text: str) -> None:
    folder = flash_modules.modules_folder(tmp_path, "0.7.2")
    folder.mkdir()
    (folder / f"{KIND.name}.json").write_text(text)
    assert not flash_modules.built(tmp_path, KIND, "0.7.2")


def test_what_the_compiler_says_is_kept(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=r"^it failed\n.*prefill.cu.7.: error"):
        flash_modules._run(["sh", "-c", "echo 'prefill.cu(7): error'; exit 1"], "it", {})
    with pytest.raises(BuildError, match="no-such-compiler is not there"):
        flash_modules._run(["no-such-compiler"], "it", {})


# ---- loading -------------------------------------------------------------------------------------


class Missing(RuntimeError):
    pass


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """A FlashInfer whose modules are files: `wants(kind)` is where it looks."""
    env = SimpleNamespace(FLASHINFER_AOT_DIR=tmp_path / "aot", full=False)
    loaded: list[Path] = []

    class Wrapper:
        def __init__(self, room: torch.Tensor, layout: str, *, backend: str) -> None:
            assert (layout, backend) == ("HND", "fa3")

        def plan(self, *given: Any, q_data_type: torch.dtype, **asked: Any) -> None:
            if env.full:
                raise OSError("no space left")
            name = f"{q_data_type}_{given[6]}_{asked['window_left'] >= 0}"
            if not (env.FLASHINFER_AOT_DIR / name).exists():
                raise Missing(name)
            loaded.append(env.FLASHINFER_AOT_DIR / name)

        def run(self, *_: Any, **__: Any) -> None:
            pass

    class Event:
        def record(self) -> None: ...

        def synchronize(self) -> None: ...

    top = ModuleType("flashinfer")
    top.__dict__.update(__version__="0.7.2", BatchPrefillWithPagedKVCacheWrapper=Wrapper)
    jit = ModuleType("flashinfer.jit")
    jit.__dict__.update(MissingJITCacheError=Missing, env=env)
    for name, module in {
        "flashinfer": top,
        "flashinfer.jit": jit,
        "flashinfer.jit.env": env,
    }.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(torch.cuda, "Event", Event)

    def pinned(count: int) -> torch.Tensor:
        return torch.empty(count, dtype=torch.int32)

    monkeypatch.setattr("c2cserve.kernels.gpu.attention.flash._pinned", pinned)
    monkeypatch.setattr("c2cserve.kernels.gpu.attention.flash_library.installed", lambda: "0.7.2")
    monkeypatch.delenv("FLASHINFER_DISABLE_JIT", raising=False)

    def offer(folder: Path, *names: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for name in names:
            (folder / f"torch.{name}").touch()

    return SimpleNamespace(env=env, loaded=loaded, offer=offer, aot=tmp_path / "aot")


def test_ours_come_before_those_that_came_with_it(
    library: Any, tmp_path: Path, caplog: Any
) -> None:
    ours = flash_modules.modules_folder(tmp_path, "0.7.2")
    library.offer(ours, "bfloat16_128_False")
    library.offer(library.aot, "bfloat16_128_False", "bfloat16_64_False")
    with caplog.at_level(logging.INFO):
        found = FlashInfer(CPU, tmp_path)
    assert library.loaded == [
        ours / "torch.bfloat16_128_False", library.aot / "torch.bfloat16_64_False",
    ]  # fmt: skip
    assert library.aot == library.env.FLASHINFER_AOT_DIR, "as it was"
    assert found.flash.kinds == {*MODULES} - {FlashKind("float16", 128)}
    (line,) = caplog.messages
    assert "FlashInfer 0.7.2 has no flashinfer_float16_128 (`c2cserve kernels build`)" in line


def test_a_workspace_that_it_can_not_write(library: Any, tmp_path: Path, caplog: Any) -> None:
    library.offer(library.aot, "bfloat16_128_False")
    library.env.full = True
    assert FlashInfer(CPU, tmp_path).flash.kinds == set()
    assert "FlashInfer cannot use its workspace: no space left" in caplog.messages


def test_it_is_told_to_compile_nothing(
    library: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    FlashInfer(CPU, tmp_path)
    assert os.environ["FLASHINFER_DISABLE_JIT"] == "1"


def test_a_models_own_kind_is_looked_for_once(library: Any, tmp_path: Path, caplog: Any) -> None:
    library.offer(library.aot, "bfloat16_128_True", "bfloat16_80_False")
    found = FlashInfer(CPU, tmp_path)
    window, odd = FlashKind("bfloat16", 128, windowed=True), FlashKind("bfloat16", 80)
    for _ in range(2):
        found.load(window, 8, 2)
        found.load(odd, 8, 2)
    assert library.loaded == [library.aot / "torch.bfloat16_128_True"]
    assert found.flash.kinds == {window}, "it has no FlashAttention 3 for 80"


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (ModuleNotFoundError("no", name="flashinfer"), "FlashInfer is not installed (pip install"),
        (ModuleNotFoundError("no einops", name="einops"), "FlashInfer does not load: no einops"),
        (OSError("libtvm_ffi.so"), "FlashInfer does not load: libtvm_ffi.so"),
    ],
)
def test_without_it_the_log_says_so(
    tmp_path: Path, caplog: Any, monkeypatch: pytest.MonkeyPatch, fault: Exception, words: str
) -> None:
    def refuse(name: str) -> Any:
        raise fault

    monkeypatch.setattr("c2cserve.kernels.gpu.attention.flash_library.import_module", refuse)
    found = FlashInfer(CPU, tmp_path)
    found.load(KIND, 8, 2)
    assert found.flash.kinds == set()
    (line,) = caplog.messages
    assert words in line
