"""The policies and the simulated machine as machine code, for simulations of many requests.

    python -m c2cserve.sim.compiled [FOLDER]      build (needs mypyc: pip install mypy setuptools)

mypyc compiles the Python sources, and results are equal to the bit. GCC compiles its code twice:
the first build counts what runs in a few short simulations, and the second is laid out by these
counts. A build whose sources have changed since is not used. Only `c2cserve simulate` and `plan`
use one. Servers and tests run the sources. `C2CSERVE_COMPILED=0` turns it off; the name of a folder
uses a build elsewhere.
"""

import gc
import hashlib
import json
import logging
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

from c2cserve.sim.constructors import written_out

log = logging.getLogger(__name__)

_SRC = Path(__file__).parents[2]
_HERE = Path(__file__).parent / "_compiled"
_MANIFEST = "manifest.json"
_COMPILED = (
    "core/actions.py", "core/events.py", "core/machine.py", "core/model.py", "core/request.py",
    "core/policy.py", "core/step.py", "policy", "runtime/driver.py", "runtime/ports.py",
    "sim/policies", "sim/world",
)  # fmt: skip
"""Folders and files under the package that are compiled,"""
_READ = (
    "core/value.py",
    "sim/compiled.py",
    "sim/constructors.py",
)
"""and those that the result depends on besides."""
_INTERPRETED = {
    "policy/slice/strategies.py",  # a generic dataclass, which mypyc cannot compile
    "sim/world/hardware.py",  # builds dataclasses from tables
    "sim/world/faults.py",  # frozen dataclasses that `plan` sends to its processes
}
_NOT_SIMULATED = "policy/fleet"
_ENV = "C2CSERVE_COMPILED"
_GROUP = "c2cserve_simulation"
_NEW_OBJECTS = 500_000
"""Objects that are made and not freed before Python looks for cycles among them. By its own 700 it
took 2 % of the time. A simulation makes none for requests."""
_FIX = "python -m c2cserve.sim.compiled"
_CFLAGS = "-DNDEBUG -fwrapv -g0 -ffp-contract=off -fvisibility=hidden -fno-plt"
"""They replace those that Python was built with, so the first two must be here. Without them an
assertion checks every access to a list or tuple. A fused multiplication and addition, as
compilers for ARM make them, has other bits."""
_SETUP = """
import sys
from mypyc.build import mypycify
from setuptools import setup

group, out, which, counted, *sources = sys.argv[1:]
options = ["--follow-imports=silent", "--ignore-missing-imports"]
modules = mypycify([*options, *sources], opt_level="3", debug_level="0", group_name=group)
[code] = [one for one in modules if one.name.endswith("__mypyc")]  # the others lead to it
code.extra_compile_args = [*code.extra_compile_args, *counted.split()]
code.extra_link_args = counted.split()
setup(
    name=group, script_args=["build_ext", "--force", "--build-lib", out],
    ext_modules=modules if which == "all" else [code],
)
"""
_COUNTED = "-fprofile-generate", "-fprofile-use -Wmissing-profile"
"""Options of the two builds. The second fails if it finds no counts."""
_LOADS = (
    ("h200-x4", "llama-3.2-3b*128", "rate=5,duration=60", "c2cserve"),
    ("h200-x4", "llama-3.1-8b*64", "rate=60,duration=8", "c2cserve"),
    ("gh200:mig7", "llama-3.2-3b*128", "rate=1,duration=120", "c2cserve"),
    ("a100x4+xeon6462cx4", "llama-2-7b*64", "rate=5,duration=30", "slinfer"),
)
"""Those simulations (hardware, catalogue, requests, policies): many models, large batches, weights
that stream, and another system."""


class NotUsed(Exception):
    """Why there is no compiled code to use, and what helps."""


class _Finder(MetaPathFinder):
    """Finds compiled modules before their sources are."""

    def __init__(self, files: Mapping[str, Path]) -> None:
        self._files = files

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        file = self._files.get(fullname)
        return None if file is None else spec_from_file_location(fullname, file)


def compiled_files() -> list[str]:
    """Return the files that are compiled, as paths under the package."""
    return [
        name for name in _files(_COMPILED)
        if name not in _INTERPRETED and not name.startswith(_NOT_SIMULATED)
        and not name.endswith("__init__.py")
    ]  # fmt: skip


def _files(roots: Sequence[str]) -> list[str]:
    package = _SRC / "c2cserve"
    found: list[Path] = []
    for root in roots:
        place = package / root
        found += [place] if place.is_file() else sorted(place.rglob("*.py"))
    return [path.relative_to(package).as_posix() for path in found]


def fingerprint() -> str:
    """Return what a build must agree with: this Python, and every source that it depends on."""
    digest = hashlib.sha256(str(sysconfig.get_config_var("SOABI")).encode())
    for name in _files((*_COMPILED, *_READ)):
        digest.update(name.encode() + b"\0" + (_SRC / "c2cserve" / name).read_bytes())
    return digest.hexdigest()


def _folder() -> Path:
    name = os.environ.get(_ENV, "")
    return Path(name) if name else _HERE


def _found() -> dict[str, Path]:
    """Return the files of all compiled modules. Raises NotUsed."""
    if os.environ.get(_ENV) == "0":
        raise NotUsed(f"{_ENV}=0")
    folder = _folder()
    try:
        manifest = json.loads((folder / _MANIFEST).read_text())
    except FileNotFoundError:
        raise NotUsed(f"not built ({_FIX})") from None
    if manifest["fingerprint"] != fingerprint():
        raise NotUsed(f"built from other sources or for another Python; build again: {_FIX}")
    return {name: folder / file for name, file in manifest["modules"].items()}


def status() -> str:
    """Return whether simulations run compiled code, and if not, why."""
    try:
        return f"compiled ({len(_found())} modules)"
    except NotUsed as reason:
        return f"pure Python: {reason}"


def use() -> bool:
    """Import compiled modules from now on, and look for cycles seldom. Return whether there are
    any to use.

    An outdated build is logged. Nothing changes if one of the modules has been imported already,
    because compiled ones and others do not mix."""
    try:
        files = _found()
    except NotUsed as reason:
        if (_folder() / _MANIFEST).exists():
            log.warning("simulating in pure Python: %s", reason)
        return False
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return True
    if not files.keys().isdisjoint(sys.modules):
        return False
    sys.meta_path.insert(0, _Finder(files))
    gc.set_threshold(_NEW_OBJECTS)
    return True


def build(folder: Path) -> None:
    """Build into the folder, which is replaced. It takes about five minutes of CPU time.

    Raises NotUsed if mypyc is not installed, CalledProcessError if it or the compiler fails."""
    if find_spec("mypyc") is None or find_spec("setuptools") is None:
        raise NotUsed("mypyc is not installed: pip install mypy setuptools")
    folder = folder.absolute()
    agreed, sources = fingerprint(), compiled_files()
    with tempfile.TemporaryDirectory() as made:
        work, out = Path(made), Path(made) / "lib"
        shutil.copytree(
            _SRC / "c2cserve", work / "c2cserve",
            ignore=lambda _, names: [name for name in names if name.endswith(".so")],
        )  # fmt: skip
        for name in sources:
            source = work / "c2cserve" / name
            source.write_text(written_out(source.read_text()))
        (work / "setup.py").write_text(_SETUP)
        if _is_gcc():
            _compile(work, sources, "all", _COUNTED[0])
            _describe(out, agreed)
            _count(out)
            _compile(work, sources, "code", _COUNTED[1])
        else:
            log.warning("the compiler is not GCC: it compiles without counts of what runs")
            _compile(work, sources, "all", "")
        _describe(out, agreed)
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(out, folder)


def _is_gcc() -> bool:
    """Return whether the C compiler is GCC, whatever its name is."""
    name = os.environ.get("CC") or str(sysconfig.get_config_var("CC"))
    command = [*name.split(), "--version"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return "Free Software Foundation" in said


def _compile(work: Path, sources: Sequence[str], which: str, options: str) -> None:
    """`which`: `code` for the module that has all code, `all` for those that lead to it, too.
    `options`: of the former."""
    flags = f"{os.environ.get('CFLAGS', '')} {_CFLAGS}".strip()
    command = [sys.executable, "setup.py", _GROUP, str(work / "lib"), which, options]
    subprocess.run(
        [*command, *(f"c2cserve/{name}" for name in sources)],
        cwd=work, check=True, env={**os.environ, "CFLAGS": flags},
    )  # fmt: skip


def _describe(out: Path, agreed: str) -> None:
    """Write the manifest of a build."""
    suffix = str(sysconfig.get_config_var("EXT_SUFFIX"))
    built = sorted(path.relative_to(out) for path in out.rglob(f"*{suffix}"))
    modules = {".".join(file.parts).removesuffix(suffix): file.as_posix() for file in built}
    manifest = {"fingerprint": agreed, "modules": modules}
    (out / _MANIFEST).write_text(json.dumps(manifest, indent=1))


def _count(out: Path) -> None:
    """Run the short simulations, which write their counts beside the build when they end."""
    path = os.pathsep.join([str(_SRC), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    environment = {**os.environ, "PYTHONPATH": path, _ENV: str(out)}
    for hardware, catalog, trace, policy in _LOADS:
        command = [
            sys.executable, "-m", "c2cserve", "simulate", "--hardware", hardware, "--catalog",
            catalog, "--trace", f"synthetic:{trace}", "--policy", policy, "--slo", "1,0.1",
        ]  # fmt: skip
        subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else _HERE
    try:
        build(folder)
    except (NotUsed, subprocess.CalledProcessError) as error:
        sys.exit(f"c2cserve: {error}")


if __name__ == "__main__":
    main()
