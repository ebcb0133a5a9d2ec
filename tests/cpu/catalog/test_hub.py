"""Downloads against a stand-in of the hub: resume, retries, cache, errors that say what to do."""

import random
import threading
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_hub import FakeHub, Repo
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from c2cserve.catalog.entry import CatalogEntry, CatalogError
from c2cserve.catalog.hub import fetch
from c2cserve.catalog.hub_http import HubClient, HubError, HubFile, HubRepository
from c2cserve.catalog.parse import parse_entry
from c2cserve.catalog.progress import ProgressLog

ENTRY = CatalogEntry(id="m", hub="org/m")
WEIGHTS = random.Random(0).randbytes(3_000_000)


def small_repo() -> Repo:
    return Repo(
        {
            "config.json": b"{}",
            "model.safetensors": WEIGHTS,
            "tokenizer.json": b"x" * 2000,
            "tokenizer_config.json": b'{"a": 1}',
            "generation_config.json": b"{}",
            "chat_template.jinja": b"{{ messages }}",
            "pytorch_model.bin": b"pickled" * 1000,
            "consolidated.safetensors": b"twice" * 1000,
            "README.md": b"hello",
            "onnx/model.safetensors": b"elsewhere",
        }
    )


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with FakeHub(org__m=small_repo()) as running:
        yield running


class Waits:
    def __init__(self) -> None:
        self.seconds: list[float] = []

    def __call__(self, seconds: float) -> None:
        self.seconds.append(seconds)


def client(hub: FakeHub, token: str | None = None, waits: Waits | None = None) -> HubClient:
    return HubClient(hub.url, token, retries=3, sleep=waits or Waits())


def test_what_is_downloaded_and_where(hub: FakeHub, tmp_path: Path) -> None:
    told: dict[str, list[tuple[int, int]]] = {}
    path = fetch(
        ENTRY,
        tmp_path,
        lambda file, done, total: told.setdefault(file, []).append((done, total)),
        client=client(hub),
    )
    assert sorted(one.name for one in path.iterdir()) == [
        "chat_template.jinja", "config.json", "generation_config.json", "model.safetensors",
        "tokenizer.json", "tokenizer_config.json",
    ]  # fmt: skip
    assert (path / "model.safetensors").read_bytes() == WEIGHTS
    steps = told["model.safetensors"]
    assert steps == sorted(steps)
    assert len(steps) > 2
    assert steps[-1] == (len(WEIGHTS), len(WEIGHTS))


def test_huggingface_hub_finds_it_too(hub: FakeHub, tmp_path: Path) -> None:
    from huggingface_hub import hf_hub_download

    path = fetch(ENTRY, tmp_path, client=client(hub))
    found = hf_hub_download("org/m", "model.safetensors", cache_dir=tmp_path, local_files_only=True)
    assert Path(found) == path / "model.safetensors"


def test_what_huggingface_hub_downloaded_is_used(hub: FakeHub, tmp_path: Path) -> None:
    from huggingface_hub import close_session, hf_hub_download

    for name in ("model.safetensors", "config.json"):
        hf_hub_download("org/m", name, cache_dir=tmp_path, endpoint=hub.url)
    close_session()
    sent = hub.sent["model.safetensors"]
    path = fetch(ENTRY, tmp_path, client=client(hub))
    assert (path / "model.safetensors").read_bytes() == WEIGHTS
    assert hub.sent["model.safetensors"] == sent == len(WEIGHTS)


def test_a_second_fetch_sends_nothing(hub: FakeHub, tmp_path: Path) -> None:
    first = fetch(ENTRY, tmp_path, client=client(hub))
    sent = hub.sent.total()
    assert fetch(ENTRY, tmp_path, client=client(hub)) == first
    assert hub.sent.total() == sent


def test_a_broken_transfer_continues_where_it_was(hub: FakeHub, tmp_path: Path) -> None:
    hub.faults.break_after["model.safetensors"] = [1_000_000, 0, 500_000]
    waits = Waits()
    path = fetch(ENTRY, tmp_path, client=client(hub, waits=waits))
    assert (path / "model.safetensors").read_bytes() == WEIGHTS
    assert hub.sent["model.safetensors"] == len(WEIGHTS), "no byte was sent twice"
    assert len(waits.seconds) == 3


def test_an_interrupted_download_continues_in_the_next_process(
    hub: FakeHub, tmp_path: Path
) -> None:
    class Stop(Exception):
        pass

    def stop(file: str, done: int, total: int) -> None:
        if file == "model.safetensors" and done > 1_500_000:
            raise Stop

    with pytest.raises(Stop):
        fetch(ENTRY, tmp_path, stop, client=client(hub))
    # Other files may be incomplete too: their downloads ended with this one.
    kept = max(one.stat().st_size for one in tmp_path.rglob("*.incomplete"))
    assert kept > 1_500_000
    hub.sent.clear()
    path = fetch(ENTRY, tmp_path, client=client(hub))
    assert (path / "model.safetensors").read_bytes() == WEIGHTS
    assert hub.sent["model.safetensors"] == len(WEIGHTS) - kept
    assert not list(tmp_path.rglob("*.incomplete"))


def test_a_file_that_another_download_completes_meanwhile_leaves_nothing(
    hub: FakeHub, tmp_path: Path
) -> None:
    """Two files of equal contents are one blob, and are fetched at the same time."""
    path = fetch(ENTRY, tmp_path, client=client(hub))
    blob = (path / "config.json").resolve()
    told: list[int] = []
    file = HubFile("config.json", 2, blob.name)
    client(hub).download("org/m", path.name, file, blob, told.append)
    assert told == [2]
    assert blob.read_bytes() == b"{}"
    assert not list(tmp_path.rglob("*.incomplete"))


def test_a_server_without_ranges_starts_over_and_is_right(hub: FakeHub, tmp_path: Path) -> None:
    hub.faults.no_ranges = True
    hub.faults.break_after["model.safetensors"] = [1_000_000]
    path = fetch(ENTRY, tmp_path, client=client(hub))
    assert (path / "model.safetensors").read_bytes() == WEIGHTS


def test_busy_hub_is_asked_again_after_what_it_says(hub: FakeHub, tmp_path: Path) -> None:
    hub.faults.status = [503, 429]
    waits = Waits()
    fetch(ENTRY, tmp_path, client=client(hub, waits=waits))
    assert waits.seconds == [3.0, 3.0]


def test_a_transfer_that_never_advances_gives_up(hub: FakeHub, tmp_path: Path) -> None:
    hub.faults.break_after["model.safetensors"] = [0] * 10
    waits = Waits()
    with pytest.raises(HubError, match=r"model\.safetensors broke off"):
        fetch(ENTRY, tmp_path, client=client(hub, waits=waits))
    assert waits.seconds == [0.5, 1.0, 2.0]


def test_damaged_content_never_gets_its_name(hub: FakeHub, tmp_path: Path) -> None:
    hub.faults.damage = True
    with pytest.raises(HubError, match="damaged"):
        fetch(ENTRY, tmp_path, client=client(hub))
    hub.faults.damage = False
    assert (fetch(ENTRY, tmp_path, client=client(hub)) / "model.safetensors").exists()


def test_a_damaged_beginning_of_an_earlier_download_is_fetched_anew(
    hub: FakeHub, tmp_path: Path
) -> None:
    path = fetch(ENTRY, tmp_path, client=client(hub)) / "model.safetensors"
    blob, content = path.resolve(), path.read_bytes()
    blob.with_name(f"{blob.name}.incomplete").write_bytes(b"?" * (len(content) // 2))
    blob.unlink()
    fetch(ENTRY, tmp_path, client=client(hub))
    assert path.read_bytes() == content
    assert not list(tmp_path.rglob("*.incomplete"))


def test_the_token_goes_to_the_hub_and_not_to_its_storage(hub: FakeHub, tmp_path: Path) -> None:
    hub.repos["org/m"].token = "secret"
    fetch(ENTRY, tmp_path, client=client(hub, "secret"))
    assert set(hub.storage_tokens) == {None}


def test_revisions(hub: FakeHub, tmp_path: Path) -> None:
    hub.repos["org/m"].revisions = ("main", "refs/pr/1")
    entry = CatalogEntry(id="m", hub="org/m", revision="refs/pr/1")
    path = fetch(entry, tmp_path, client=client(hub))
    assert path.name == "c" * 40
    exact = CatalogEntry(id="m", hub="org/m", revision="c" * 40)
    assert fetch(exact, tmp_path, client=client(hub)) == path


def test_shards(tmp_path: Path) -> None:
    import json

    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    index = json.dumps({"weight_map": {"a": names[0], "b": names[1]}}).encode()
    files = {name: name.encode() * 100 for name in names}
    files |= {"config.json": b"{}", "model.safetensors.index.json": index}
    with FakeHub(org__m=Repo(files)) as hub:
        path = fetch(ENTRY, tmp_path, client=client(hub))
    assert all((path / name).read_bytes() == files[name] for name in names)


def test_unreachable_hub_with_a_cached_copy(
    hub: FakeHub, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = fetch(ENTRY, tmp_path, client=client(hub))
    hub.faults.status = [503] * 10
    assert fetch(ENTRY, tmp_path, client=client(hub)) == path
    assert "using the cached copy" in caplog.text


def test_offline(hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(HubError, match=r"not in the cache.*HF_HUB_OFFLINE"):
        fetch(ENTRY, tmp_path, client=client(hub))
    assert hub.requests == []
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    path = fetch(ENTRY, tmp_path, client=client(hub))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert fetch(ENTRY, tmp_path, client=client(hub)) == path


def test_environment(hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.repos["org/m"].token = "from-env"
    monkeypatch.setenv("HF_TOKEN", "from-env")
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.url)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    path = fetch(ENTRY)
    assert path.is_relative_to(tmp_path / "cache" / "models--org--m" / "snapshots")


def test_space_is_checked_before_the_first_byte(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    hub.faults.break_after["model.safetensors"] = [1_000_000] + [0] * 10
    with pytest.raises(HubError, match="broke off"):
        fetch(ENTRY, tmp_path, client=client(hub))
    hub.sent.clear()
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage(0, 0, 1_000_000))
    with pytest.raises(HubError, match=r"needs 0\.002 GB more .* 0\.001 GB are free"):
        fetch(ENTRY, tmp_path, client=client(hub))
    assert hub.sent.total() == 0


def test_progress_log(caplog: pytest.LogCaptureFixture) -> None:
    now_s = 0.0
    progress = ProgressLog("m", lambda: now_s)
    with caplog.at_level("INFO"):
        for name in ("a", "b"):
            progress(name, 500_000_000, 1_000_000_000)
        for second in range(1, 11):
            now_s = float(second)
            progress("a", 500_000_000 + second * 50_000_000, 1_000_000_000)
        progress("b", 1_000_000_000, 1_000_000_000)
    assert [record.getMessage() for record in caplog.records] == [
        "m: 1.25 of 2.00 GB, 50.0 MB/s",
        "m: 1.50 of 2.00 GB, 50.0 MB/s",
        "m: 2.00 of 2.00 GB, 100.0 MB/s",
    ]


def test_nothing_fetched_nothing_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        ProgressLog("m")("a", 10, 10)
    assert not caplog.records


def test_a_listing_can_not_name_paths(hub: FakeHub, tmp_path: Path) -> None:
    hub.repos["org/m"].commit = "../../elsewhere"
    with pytest.raises(HubError, match="is not a hash"):
        fetch(ENTRY, tmp_path, client=client(hub))


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        (CatalogEntry(id="x", hub="org/none"), "does not exist: check the id"),
        (CatalogEntry(id="x", hub="org/m", revision="v9"), "no revision 'v9'"),
        (CatalogEntry(id="x", hub="org/gated"), "accept its terms"),
        (CatalogEntry(id="x", hub="org/private"), "set HF_TOKEN"),
        (CatalogEntry(id="x", hub="org/bin"), r"no \.safetensors"),
        (CatalogEntry(id="x", hub="org/adapter"), r"no config\.json"),
    ],
)
def test_errors_say_what_to_do(tmp_path: Path, entry: CatalogEntry, says: str) -> None:
    repos = {
        "org__m": small_repo(),
        "org__gated": Repo({}, token="t", gated=True),
        "org__private": Repo({}, token="t"),
        "org__bin": Repo({"config.json": b"{}", "pytorch_model.bin": b"x"}),
        "org__adapter": Repo({"adapter.safetensors": b"x"}),
    }
    with FakeHub(**repos) as hub, pytest.raises(HubError, match=says) as caught:
        fetch(entry, tmp_path, client=client(hub))
    assert len(str(caught.value).splitlines()) == 1
    assert str(entry.hub) in str(caught.value)


class HalfBroken(HubClient):
    """A hub on which one file fails at once, and the other arrives for ever."""

    def __init__(self) -> None:
        super().__init__("http://127.0.0.1:1", None)
        self.began, self.ended = threading.Event(), threading.Event()

    def repository(self, repo: str, revision: str) -> HubRepository:
        names = ("config.json", "model.safetensors", "tokenizer.json")
        files = tuple(HubFile(name, 10**12, f"{n}" * 40) for n, name in enumerate(names))
        return HubRepository(repo, "c" * 40, files)

    def download(self, repo: str, commit: str, file: HubFile, target: Path, advance: Any) -> None:
        if file.name == "config.json":
            assert self.began.wait(30)
            raise HubError("no such file")
        self.began.set()
        try:
            while not self.ended.wait(0.01):
                advance(1)
        finally:
            self.ended.set()


def test_a_file_that_fails_ends_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    half = HalfBroken()
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage(10**15, 0, 10**15))
    with pytest.raises(HubError, match="no such file"):
        fetch(ENTRY, tmp_path, lambda *_: None, client=half)
    assert half.ended.is_set()


@pytest.mark.parametrize(
    "wrong", ["0" * 97, "org/" + "a" * 97, "a--b", "org/a..b", "a-", "a.", "org/a.git", "a/b/c"]
)
def test_an_id_that_no_repository_has_is_a_mistake_of_the_entry(wrong: str, tmp_path: Path) -> None:
    with pytest.raises(CatalogError, match="a repository id such as"):
        parse_entry({"id": "m", "hub": wrong}, tmp_path)
    with pytest.raises(HFValidationError):
        validate_repo_id(wrong)


@pytest.mark.parametrize("right", ["0" * 96, "Qwen/Qwen3-8B", "org_/a_", "a", "a.b-c_d/e"])
def test_other_ids_are_taken(right: str, tmp_path: Path) -> None:
    assert parse_entry({"id": "m", "hub": right}, tmp_path).hub == right
    validate_repo_id(right)
