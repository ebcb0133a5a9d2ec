"""Packaged traces and length samples by name. Any other name is a path."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path

from c2cserve.sim.workload.lengths import Lengths, pairs, quantiles
from c2cserve.sim.workload.rows import Row, TraceError, columns, fields, read

SLINFER_RPM = "azfunc2019_slinfer128_rpm.csv"


def data_path(name: str) -> Path:
    """Return the path of a packaged file."""
    return Path(str(files("c2cserve.sim") / "data" / "traces" / name))


@dataclass(frozen=True, slots=True)
class Packaged:
    file: str
    flag: str = ""
    """Only functions with this flag in the per-minute file belong to the trace."""
    where: Mapping[str, str] = field(default_factory=dict[str, str])


_AZURE_FUNCTIONS = "azfunc2019_slinfer128_requests.csv.gz"
TRACES = {
    "slinfer128": Packaged(_AZURE_FUNCTIONS),
    "slinfer64": Packaged(_AZURE_FUNCTIONS, "in_64"),
    "slinfer32": Packaged(_AZURE_FUNCTIONS, "in_32"),
    "azure-conv": Packaged("azure_llm_2023_conv.csv.gz"),
    "mooncake": Packaged("mooncake_synthetic.csv.gz"),
    "servegen": Packaged("servegen_m-small_rates.csv.gz"),
    "servegen-clients": Packaged("servegen_clients.csv.gz"),
}

_LENGTHS = "lengths.csv.gz"
LENGTHS: Mapping[str, Callable[[], Lengths]] = {
    "azure-conv": lambda: pairs(data_path("azure_llm_2023_conv.csv.gz"), ""),
    "sharegpt": lambda: pairs(data_path(_LENGTHS), "sharegpt_8k_llama2tok"),
    "arxiv": lambda: pairs(data_path(_LENGTHS), "arxiv_summ_llama2tok"),
    "lmsys": lambda: pairs(data_path(_LENGTHS), "apex_lmsys_llamatok"),
    "creation": lambda: pairs(data_path(_LENGTHS), "apex_creation_llamatok"),
    "servegen": lambda: quantiles(data_path("servegen_length_quantiles.csv.gz"), "m-small"),
}


def find_lengths(name: str) -> Lengths:
    """Find lengths by name, or by `PATH` or `PATH:DATASET` (`PATH:MODEL` for quantiles).

    Raises OSError, TraceError."""
    check_lengths(name)
    if name in LENGTHS:
        return LENGTHS[name]()
    path, _, dataset = name.partition(":")
    if {"field", "q", "value"} <= columns(Path(path)):
        return quantiles(Path(path), dataset)
    return pairs(Path(path), dataset)


def check_lengths(name: str) -> None:
    """Raise TraceError if there are no lengths of that name, also where none are needed."""
    if name not in LENGTHS and not Path(name.partition(":")[0]).exists():
        raise TraceError(f"no lengths {name!r}; there are {', '.join(LENGTHS)}, or a file")


def find_path(name: str) -> Path:
    """Return the file of a packaged trace, or the path itself. Raises TraceError."""
    if name in TRACES:
        return data_path(TRACES[name].file)
    path = Path(name)
    if not path.exists() or path.is_dir():
        raise TraceError(f"no trace {name!r}; there are {', '.join(TRACES)}, or a file")
    return path


def find_rows(name: str, where: Mapping[str, str]) -> list[Row]:
    """Read a trace with one line per request. Raises OSError, TraceError."""
    packaged = TRACES.get(name)
    rows = read(find_path(name), where)
    if packaged is None or not packaged.flag:
        return rows
    chosen = {line["func"] for line in fields(data_path(SLINFER_RPM)) if line[packaged.flag] == "1"}
    return [row for row in rows if row.source in chosen]
