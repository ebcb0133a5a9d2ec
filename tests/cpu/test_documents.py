"""README and docs are true as far as a program can tell: commands, links, tests and figures."""

import json
import re
import shlex
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
from documents import RESULTS, ROOT
from documents.commands import SHELL, CommandError, all_options, check, commands_of, options_in
from documents.figures import FigureError, Mark, marks, numbers
from documents.names import missing_files, missing_in_drawings, missing_tests, named_results
from documents.pages import Page, pages

from c2cserve.policy.baselines.presets import PRESETS
from c2cserve.sim.studies.registry import STUDIES
from c2cserve.sim.workload.catalogue import TRACES
from c2cserve.sim.world import hardware
from c2cserve.sim.world.shapes import catalogue

PAGES = pages()
BENCHMARKS = next(page for page in PAGES if page.path.name == "benchmarks.md")
each_page = pytest.mark.parametrize("page", PAGES, ids=str)

OTHER_PROGRAMS = {
    "--head": "ray", "--object-store-memory": "ray", "--labels": "ray",
    "--shm-size": "docker", "--read-only": "docker", "--tmpfs": "docker",
    "--cap-drop": "docker", "--security-opt": "docker", "--gpus": "docker", "--ulimit": "docker",
    "--entrypoint": "docker", "--read-only-tmpfs": "podman",
    "--constraint": "pip",
}  # fmt: skip
"""Options in the documents that are not of this project."""

ALLOWED: dict[str, dict[str, str]] = {
    "README.md": {
        r"Llama 2/3\.x|Qwen2/2\.5|Llama-3-8B|Llama-3 3B and 8B|Qwen3-14B|Qwen3-30B-A3B|Qwen3"
        r"|One 8B model": "names of models",
        r"\b[HA]\d00s?\b|GH200|GB200|PCIe 5|bf16": "names of hardware and of a number format",
        r"kernel 5\.14\+|Python 3\.11\+|C\+\+17|vLLM 0\.26|Apache-2\.0": "versions",
        r"refused with 429": "a status of HTTP",
        r"prompt of 512 tokens|batch 1\b|1 to 256 users|up to 32 users": "what was asked for",
        r"FlashAttention 3": "a name",
        r"slices of 16 SMs|GPU 0 serves|lend it 120 GB": "what the command says",
    },
    "docs/benchmarks.md": {
        r"2 cores|1 thread|60 s|[Bb]atch [18]\b|8 requests of 1 to 8 tokens|128 tokens|1\.24 B|1B\b"
        r"|300 requests/s|200 models, 8 slices|1,000 models, 64 slices|8 models of 4 requests"
        r"|2 layers|at 1 to 256 users": "what was asked for",
        r"p50|p99|95 %": "names of quantiles",
        r"AVX2|AVX-512(-BF16)?|bf16": "names of instruction sets and of a number format",
    },
}
"""Numbers of these two pages that are no results, with why; all others need a mark."""


@each_page
def test_commands_parse(page: Page) -> None:
    wrong: list[str] = []
    for line, words in commands_of(page):
        try:
            check(words, page.path.parent)
        except CommandError as error:
            wrong.append(f"{page}:{line.number}: {error}")
    assert not wrong, "\n".join(wrong)


@each_page
def test_options_exist(page: Page) -> None:
    named = {option: line.number for line in page.lines for option in options_in(line.text)}
    known = all_options() | OTHER_PROGRAMS.keys()
    wrong = [f"{page}:{number}: {name}" for name, number in named.items() if name not in known]
    assert not wrong, "options that no command has:\n" + "\n".join(wrong)


@each_page
def test_links_lead_somewhere(page: Page) -> None:
    by_path = {one.path: one for one in PAGES}
    wrong: list[str] = []
    for line, target in page.links():
        if re.match(r"https?://|mailto:", target):
            continue
        name, _, anchor = target.partition("#")
        path = (page.path.parent / name).resolve() if name else page.path
        there = path.exists() and (
            not anchor or (path in by_path and anchor in by_path[path].anchors)
        )
        if not there:
            wrong.append(f"{page}:{line.number}: {target}")
    assert not wrong, "\n".join(wrong)


@each_page
def test_named_files_and_tests_exist(page: Page) -> None:
    wrong = [*missing_files(page), *missing_in_drawings(page), *missing_tests(page)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("c2cserve srve", "no command srve"),
        ("c2cserve serve --catalogue x", "no --catalogue"),
        ("c2cserve models shw NAME", "no command shw"),
        ("c2cserve models show A B", "takes no argument B"),
        ("c2cserve bench serve --rate", "--rate needs a value"),
        ("make tests", "no target tests"),
        ("make demo STAY=1", "does not read STAY"),
        ("pip install 'c2cserve[gpu]'", "no package index"),
        ("pip install '.[gpus]'", "no extra gpus"),
        ("python benchmarks/gone.py", "no file"),
        ("python benchmarks/gemm.py --cold", "no --cold"),
        ("scripts/soak --hours 3", "no --hours"),
        ("python -m c2cserve.nowhere", "no module"),
    ],
)
def test_wrong_commands_are_found(command: str, says: str) -> None:
    with pytest.raises(CommandError, match=re.escape(says)):
        check(shlex.split(command))


def test_what_is_not_there_is_found(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text(
        "# A page, twice\n## A page, twice\n"
        "`policy/gone.py` `tests/e2e/test_faults.py::test_nothing` `test_no_file.py`\n"
        "4.5 ms <!-- 4.5 = step_overhead.json results/batch_1/best_us us to ms -->\n"
    )
    page = Page(path)
    assert page.anchors == {"a-page-twice", "a-page-twice-1"}
    said = [missing_files(page), missing_tests(page)]
    assert [len(list(one)) for one in said] == [2, 1]
    (mark,) = [mark for _, found in marks(page) for mark in found]
    with pytest.raises(FigureError, match=r"4\.5 is shown, the result is 0\.2"):
        mark.check()


@pytest.mark.parametrize(
    "mark",
    ["1 = gone.json results", "1 = switch.json results/gone", "1 = switch.json results", "1"],
)
def test_marks_that_lead_nowhere_are_found(mark: str, tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text(f"1 <!-- {mark} -->\n")
    with pytest.raises(FigureError):
        list(marks(Page(path)))


@each_page
def test_lists_and_headings_begin_their_lines(page: Page) -> None:
    """An item that is joined to the one before, or a heading to its paragraph, is not shown as
    one."""
    lines = [line for line in page.lines if line.language is None]
    joined = [line for line in lines if re.search(r"[.:;)] - (?:[A-Z][a-z]|`)", line.text)]
    headings = {line.number for line in lines if re.match(r"#+ ", line.text)}
    stuck = [
        line
        for line in lines
        if line.text.strip() and line.number + 1 in headings and line.number not in headings
    ]
    wrong = [f"{page}:{line.number}: {line.text[:60]}" for line in [*joined, *stuck]]
    assert not wrong, "\n".join(wrong)


@each_page
def test_simulations_can_begin(page: Page) -> None:
    """Machines, shapes, traces, presets, studies and targets of the examples exist, and a model
    from a hub, whose size is not known yet, is in no catalogue that is simulated."""
    hub = any(line.language == "toml" and line.text.startswith("hub") for line in page.lines)
    for line, words in commands_of(page):
        if words[:2] not in (["c2cserve", "simulate"], ["c2cserve", "plan"]):
            continue
        given = dict(pairwise(words))
        place = f"{page}:{line.number}"
        for machine in given.get("--hardware", "h200-x1").split(","):
            name, _, layout = machine.partition(":")
            layouts = {one for device in hardware.find(name).devices for one in device.layouts}
            assert layout in {"", *layouts}, place
        catalog = given.get("--catalog", "")
        assert not (catalog.endswith(".toml") and hub), f"{place}: {catalog} has models of a hub"
        if catalog and not catalog.endswith(".toml"):
            assert catalogue(catalog), place
        names = {
            "--policy": {*PRESETS, "least-loaded"},  # of a recipe
            "--trace": set(TRACES),
            "--study": {"list", *STUDIES},
        }
        for option, known in names.items():
            value = given.get(option, "NAME")
            assert value in known or value.isupper() or value.startswith("synthetic:"), place


def test_every_image_is_shown() -> None:
    shown = {target for page in PAGES for _, target in page.links()}
    images = {f"images/{path.name}" for path in (ROOT / "docs" / "images").iterdir()}
    assert images <= shown, f"no page shows {', '.join(sorted(images - shown))}"


def page_named(name: str) -> Page:
    return next(page for page in PAGES if str(page) == name)


@each_page
def test_figures_are_the_results(page: Page) -> None:
    wrong: list[str] = []
    for line, found in marks(page):
        for mark in found:
            try:
                mark.check()
            except FigureError as error:
                wrong.append(f"{page}:{line.number}: {error}")
        bare = {mark.shown for mark in found} - set(numbers(line.prose))
        wrong += [f"{page}:{line.number}: {shown} is only in a mark" for shown in bare]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", ALLOWED)
def test_every_figure_has_a_mark(name: str) -> None:
    wrong: list[str] = []
    for line, found in marks(page_named(name)):
        if line.text.startswith("| [`"):
            continue  # the table of files, which test_the_table_of_results_is_complete reads
        shown = Counter(numbers(without_allowed(name, line.prose)))
        marked = Counter(mark.shown for mark in found)
        if shown != marked:
            bare, idle = list((shown - marked).elements()), list((marked - shown).elements())
            wrong.append(f"{name}:{line.number}: without a mark {bare}, only in a mark {idle}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", ALLOWED)
def test_comments_of_commands_have_no_figures(name: str) -> None:
    """A mark cannot stand in a code block, so no result can either."""
    for line in page_named(name).lines:
        if line.language in SHELL and "#" in line.text:
            comment = line.text.partition("#")[2]
            assert not numbers(without_allowed(name, comment)), f"{name}:{line.number}: {comment}"


@pytest.mark.parametrize("name", ALLOWED)
def test_allowed_numbers_are_still_there(name: str) -> None:
    text = "\n".join(line.text for line in page_named(name).lines)
    for pattern, why in ALLOWED[name].items():
        for one in re.split(r"\|(?![^()]*\))", pattern):
            assert re.search(one, text), f"{name}: {one} ({why}) is not on the page any more"


def without_allowed(name: str, text: str) -> str:
    for pattern in ALLOWED[name]:
        text = re.sub(pattern, " ", text)
    return text


@pytest.mark.parametrize(
    ("shown", "value", "right"),
    [
        ("279", 279.49, True), ("279", 279.51, False), ("4.48", 4.4766, True), ("4.4", 4.46, False),
        ("18,013", 18013.0, True), ("+0.4", 0.437, True), ("-0.06", -0.0641, True),
        ("0.06", -0.0641, False), ("7.0", 6.97, True), ("7.00", 6.97, False),
    ],
)  # fmt: skip
def test_a_figure_is_its_result_rounded_to_the_digits_shown(
    shown: str, value: float, right: bool
) -> None:
    if right:
        Mark(shown, value).check()
    else:
        with pytest.raises(FigureError):
            Mark(shown, value).check()


RESULT_FILES = sorted(RESULTS.glob("*.json"))


@pytest.mark.parametrize("path", RESULT_FILES, ids=lambda path: path.stem)
def test_results_say_machine_date_and_commit(path: Path) -> None:
    result = json.loads(path.read_text())
    assert result["machine"]
    assert re.match(r"\d{4}-\d\d-\d\d", result["date"])
    assert re.fullmatch(r"(recorded in commit )?[0-9a-f]{7,40}", result["commit"])


def test_every_result_is_on_a_page() -> None:
    others = [page for page in PAGES if page is not BENCHMARKS]
    named = set[str]().union(*map(named_results, others))
    shown = {key for page in (BENCHMARKS,) for key in results_in_marks(page)}
    idle = {path.name for path in RESULT_FILES} - named - shown
    assert not idle, f"no page reads {', '.join(sorted(idle))}"


def results_in_marks(page: Page) -> set[str]:
    comments = [comment for line in page.lines for comment in line.comments]
    return {name for text in comments for name in re.findall(r"\w+\.json", text)}


def test_the_table_of_results_is_complete() -> None:
    """`docs/benchmarks.md` lists every file with its own date and commit."""
    rows = [line.text for line in BENCHMARKS.lines if line.text.startswith("| [`")]
    listed: dict[str, tuple[str, str]] = {}
    for row in rows:
        cells = [cell.strip() for cell in row.strip("| ").split(" | ")]
        listed[cells[0].split("`")[1]] = (cells[3], cells[4])
    expected = {path.name: date_and_commit(path) for path in RESULT_FILES}
    assert listed == expected


def date_and_commit(path: Path) -> tuple[str, str]:
    result = json.loads(path.read_text())
    own = result["commit"].removeprefix("recorded in commit ")
    return result["date"][:10], own if own == result["commit"] else f"{own} (recorded in)"
