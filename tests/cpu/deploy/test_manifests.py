"""Manifests in `deploy/` as far as they can be checked without a cluster: by Kubernetes' schemas,
where the package `kubernetes-validate` is installed, and that their parts fit together."""

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from c2cserve.cli.commands import COMMANDS
from c2cserve.terminal.sizes import read_size

DEPLOY = Path(__file__).parents[3] / "deploy"
MANIFESTS = ("kubernetes.yaml", "kuberay.yaml")
VERSIONS = ("1.28", "1.37")
"""The oldest and the newest Kubernetes whose schemas must hold."""

Document = dict[str, Any]


@cache
def documents(name: str) -> list[Document]:
    return list(yaml.safe_load_all((DEPLOY / name).read_text()))


def templates(name: str) -> Iterator[Document]:
    """Yield what pods are made of."""
    for document in documents(name):
        spec = document["spec"]
        if document["kind"] == "RayCluster":
            yield spec["headGroupSpec"]["template"]
            yield from (group["template"] for group in spec["workerGroupSpecs"])
        elif "template" in spec:
            yield spec["template"]


@pytest.mark.parametrize("name", MANIFESTS)
@pytest.mark.parametrize("version", VERSIONS)
def test_manifests_are_valid_by_kubernetes_schemas(name: str, version: str) -> None:
    """KubeRay's own resource has no schema there: of it, the pods are checked."""
    validator: Any = pytest.importorskip("kubernetes_validate")
    checked = [one for one in documents(name) if one["kind"] != "RayCluster"]
    for template in templates(name):
        metadata = {"name": "pod", **template["metadata"]}
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}
        checked.append(pod)
    for one in checked:
        validator.validate(one, version, strict=True)
    checked[-1]["spec"]["terminationGraceSeconds"] = 1
    with pytest.raises(validator.ValidationError):
        validator.validate(checked[-1], version, strict=True)
    del checked[-1]["spec"]["terminationGraceSeconds"]


@pytest.mark.parametrize("name", MANIFESTS)
def test_services_lead_to_their_pods(name: str) -> None:
    [service] = [one["spec"] for one in documents(name) if one["kind"] == "Service"]
    for template in templates(name):
        labels, containers = template["metadata"]["labels"], template["spec"]["containers"]
        assert service["selector"].items() <= labels.items()
        opened = {port["containerPort"] for one in containers for port in one.get("ports", ())}
        assert {one["port"] for one in service["ports"]} <= opened
        for one in containers:
            asked = [one[probe] for probe in ("readinessProbe", "livenessProbe")]
            assert {probe["httpGet"]["port"] for probe in asked if "httpGet" in probe} <= opened
    for document in documents(name):
        if document["kind"] == "Deployment":
            spec = document["spec"]
            assert spec["selector"]["matchLabels"] == spec["template"]["metadata"]["labels"]


@pytest.mark.parametrize("name", MANIFESTS)
def test_mounts_have_volumes_and_shared_memory_fits(name: str) -> None:
    for template in templates(name):
        spec = template["spec"]
        volumes = {one["name"]: one for one in spec["volumes"]}
        mounted = [mount for one in spec["containers"] for mount in one["volumeMounts"]]
        assert {one["name"] for one in mounted} == set(volumes)
        limits = [one["resources"].get("limits", {}) for one in spec["containers"]]
        memory = max(read_size(one["memory"]) for one in limits if one)
        shared = volumes["shm"]["emptyDir"]
        assert shared["medium"] == "Memory"
        # What lies in it counts for the container's limit.
        assert read_size(shared["sizeLimit"]) < memory


@pytest.mark.parametrize("name", MANIFESTS)
def test_pods_wait_for_a_drain(name: str) -> None:
    """SIGKILL must not come before the server has ended by itself, and has freed its memory."""
    command: Any = COMMANDS["serve"].load("serve")
    [drain_s] = [one.default for one in command.params if one.name == "drain_timeout"]
    for template in templates(name):
        assert template["spec"]["terminationGracePeriodSeconds"] > drain_s
