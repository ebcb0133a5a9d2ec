"""Images and manifests run c2cserve as a user who may do little. (Docker itself is not needed.)"""

import os
import re
import subprocess
import tomllib
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import yaml

from c2cserve.cli.commands import COMMANDS
from c2cserve.server.health_check import check

ROOT = Path(__file__).parents[3]
IMAGES = ["Dockerfile", "Dockerfile.cuda"]


def instructions(name: str) -> list[tuple[str, str]]:
    """Of the last stage of a Dockerfile: instruction and arguments."""
    found = all_instructions(name)
    last = max(i for i, (one, _) in enumerate(found) if one == "FROM")
    return found[last:]


@pytest.mark.parametrize("name", IMAGES)
def test_images_end_as_a_user_who_is_not_root(name: str) -> None:
    found = instructions(name)
    users = [value for one, value in found if one == "USER"]
    assert users == ["1000:1000"], "a number: what a name means is not known outside"
    after = [one for one, _ in found[found.index(("USER", "1000:1000")) :]]
    assert not {"RUN", "COPY", "ADD"} & set(after)
    entry = next(value for one, value in found if one == "ENTRYPOINT")
    assert '"serve"' in entry
    assert "KEY" not in " ".join(value for one, value in found if one in ("ENV", "ARG"))


def all_instructions(name: str) -> list[tuple[str, str]]:
    """Of all stages of a Dockerfile: instruction and arguments."""
    text = re.sub(r"^\s*#.*\n", "", (ROOT / name).read_text(), flags=re.MULTILINE)
    lines = [line for line in text.replace("\\\n", " ").splitlines() if line.strip()]
    return [(line.split()[0], " ".join(line.split()[1:])) for line in lines]


@pytest.mark.parametrize("name", IMAGES)
def test_what_is_copied_is_there(name: str) -> None:
    """Docker fails late, and only where it runs."""
    ignored = (ROOT / ".dockerignore").read_text().split()
    for one, value in all_instructions(name):
        assert one != "ADD", "COPY does no more than it says"
        if one != "COPY" or value.startswith("--from="):
            continue
        for source in value.split()[:-1]:
            assert (ROOT / source).exists(), source
            assert source.split("/")[0] not in ignored, source


@pytest.mark.parametrize("name", IMAGES)
def test_what_is_installed_is_pinned(name: str) -> None:
    for one, value in all_instructions(name):
        if one == "FROM":
            image = value.split()[0]
            assert re.fullmatch(r"[\w./-]+:\d[\w.-]+", image), f"{image}: no tag says its version"
        if one != "RUN":
            continue
        if "apt-get" in value:
            assert "apt-get update && apt-get install -y --no-install-recommends" in value
            assert "rm -rf /var/lib/apt/lists/*" in value
        if "pip install" in value:
            assert "--no-cache-dir" in value
            assert "--constraint constraints.txt" in value
        assert "sudo" not in value
        assert "curl" not in value
        assert "|" not in value.replace("||", ""), "a pipe hides the failure of all but its end"


@pytest.mark.parametrize("name", IMAGES)
def test_the_health_check_knows_the_server(name: str) -> None:
    """It is told of TLS and the port by the command line of the container's first process."""
    found = dict(instructions(name))
    assert found["HEALTHCHECK"].endswith('CMD ["python", "-m", "c2cserve.server.health_check"]')
    assert found["ENTRYPOINT"].startswith('["c2cserve"'), "no shell that hides the options"


@pytest.mark.parametrize("options", [["--port", "{}"], ["--slices", "2", "--port={}"]])
def test_a_health_check_ends_well_or_raises(options: list[str]) -> None:
    class Health(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/health" else 404)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Health) as server:
        given = [option.format(server.server_port) for option in options]
        command = "\0".join(["c2cserve", "serve", *given, ""]).encode()
        thread = Thread(target=server.handle_request)
        thread.start()
        check(command)
        thread.join()
    with pytest.raises(OSError, match="refused"):
        check(command)


@pytest.mark.parametrize("name", IMAGES)
def test_the_check_of_images_runs_them_as_their_first_lines_say(name: str) -> None:
    head = (ROOT / name).read_text().partition("FROM")[0]
    command = head.partition("Run:")[2].replace("\\\n#", " ")
    rights = re.findall(r"--(?:read-only|cap-drop \S+|security-opt \S+)", command)
    assert len(rights) == 3
    check = (ROOT / "scripts/image_check").read_text()
    assert all(one in check for one in rights)


def test_the_check_of_images_fails_without_an_engine() -> None:
    script = [str(ROOT / "scripts/image_check"), "--no-build"]
    for variables, status in (({"ENGINE": "false"}, 1), ({"ENGINE": "", "PATH": "/nowhere"}, 2)):
        found = subprocess.run(
            ["/bin/bash", *script], env={**os.environ, **variables}, capture_output=True,
            text=True, check=False,
        )  # fmt: skip
        assert found.returncode == status, found.stderr
    assert "neither docker nor podman" in found.stderr


def test_the_two_images_have_the_same_base() -> None:
    bases = {value.split()[0] for name in IMAGES for one, value in all_instructions(name)
             if one == "FROM"}  # fmt: skip
    assert len(bases) == 1


def test_every_direct_dependency_has_one_version() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    versions = [line for line in lines if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.+-]+", line) for line in versions)
    pinned = {_plain(line.split("==")[0]) for line in versions}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["gpu"], *extras["flash"]]
    names = {_plain(re.split(r"[^\w.-]", one)[0]) for one in wanted}
    assert names - pinned == {"nvidia-curand", "nvidia-ml-py"}, "torch's choice; the driver's"


TRITON_OF_TORCH = {"2.13.0": "3.7.1"}
"""What torch's builds for CUDA require. The build for CPUs, which tests run with, requires none."""


def test_torch_for_cuda_and_triton_can_be_installed_together() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    versions = dict(line.split("==") for line in lines if "==" in line)
    assert versions["triton"] == TRITON_OF_TORCH[versions["torch"]]


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_keys_are_not_sent_to_the_builder() -> None:
    """Those of the documents' examples, wherever in the checkout they were made: admin.key,
    deploy/admin.key, server.key and keys.json."""
    assert {"**/*.key", "**/keys.json"} <= set((ROOT / ".dockerignore").read_text().split())
    assert {"*.key", "keys.json"} <= set((ROOT / ".gitignore").read_text().split())


def serve_options() -> set[str]:
    command: Any = COMMANDS["serve"].load("serve")
    return {option for one in getattr(command, "params", ()) for option in one.opts}


def check_options(args: list[str]) -> None:
    assert {one for one in args if one.startswith("--")} <= serve_options()


def test_compose() -> None:
    (service,) = yaml.safe_load((ROOT / "deploy/compose.yaml").read_text())["services"].values()
    assert service["user"] == "1000:1000"
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert all(one.startswith("127.0.0.1:") for one in service["ports"])
    assert all(one.endswith(":ro") for one in service["volumes"])
    check_options(service["command"])


def test_kubernetes() -> None:
    documents = list(yaml.safe_load_all((ROOT / "deploy/kubernetes.yaml").read_text()))
    pod = next(one for one in documents if one["kind"] == "Deployment")["spec"]["template"]["spec"]
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    (container,) = pod["containers"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }  # fmt: skip
    keys = next(one for one in pod["volumes"] if one["name"] == "keys")
    assert keys["secret"]["defaultMode"] & 0o007 == 0, "--admin-key-file refuses others"
    written = {one["mountPath"] for one in container["volumeMounts"] if not one.get("readOnly")}
    assert written == {"/dev/shm"}
    check_options(container["args"])


RAY_CLUSTER = {
    "": {
        "headGroupSpec", "workerGroupSpecs", "rayVersion", "enableInTreeAutoscaling",
        "autoscalerOptions", "headServiceAnnotations", "suspend", "gcsFaultToleranceOptions",
    },
    "headGroupSpec": {
        "serviceType", "headService", "enableIngress", "rayStartParams", "template",
    },
    "workerGroupSpecs": {
        "groupName", "replicas", "minReplicas", "maxReplicas", "numOfHosts", "rayStartParams",
        "template", "scaleStrategy",
    },
}  # fmt: skip
"""The fields of `ray.io/v1 RayCluster` that KubeRay documents (its API reference)."""


def test_kuberay() -> None:
    documents = list(yaml.safe_load_all((ROOT / "deploy/kuberay.yaml").read_text()))
    [cluster] = [one for one in documents if one["kind"] == "RayCluster"]
    assert cluster["apiVersion"] == "ray.io/v1"
    spec = cluster["spec"]
    head, [workers] = spec["headGroupSpec"], spec["workerGroupSpecs"]
    assert set(spec) <= RAY_CLUSTER[""]
    assert set(head) <= RAY_CLUSTER["headGroupSpec"]
    assert set(workers) <= RAY_CLUSTER["workerGroupSpecs"]
    assert {"headGroupSpec"} <= set(spec)
    assert {"groupName", "minReplicas", "maxReplicas", "rayStartParams", "template"} <= set(workers)
    pinned = re.search(r"^ray==(.*)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned is not None
    assert spec["rayVersion"] == pinned[1]
    for group in (head, workers):
        assert all(isinstance(one, str) for one in group["rayStartParams"].values())
        pod = group["template"]["spec"]
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["automountServiceAccountToken"] is False
        ray, front = pod["containers"]
        assert {one["name"] for one in ray["env"]} >= {
            "RAY_memory_monitor_refresh_ms", "RAY_worker_niceness",
        }  # fmt: skip
        # The front is a driver: it needs the raylet's sockets, its shared memory, its processes.
        assert ray["volumeMounts"] == front["volumeMounts"]
        assert pod["shareProcessNamespace"] is True
        volumes = {one["name"] for one in pod["volumes"]}
        assert {one["name"] for one in front["volumeMounts"]} == volumes
        check_options(front["args"])
        for container in (ray, front):
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
            assert {"readinessProbe", "livenessProbe"} <= set(container), "KubeRay's own would fail"
    [service] = [one for one in documents if one["kind"] == "Service"]
    assert service["spec"]["selector"] == workers["template"]["metadata"]["labels"]


def test_options_are_known() -> None:
    assert {"--admin-key-file", "--catalog", "--model-root", "--ssl-certfile"} <= serve_options()
