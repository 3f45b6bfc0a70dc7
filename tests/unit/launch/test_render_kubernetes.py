"""Kubernetes manifests, against the Kubernetes schemas and the documented fields of KubeRay."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import kubernetes_validate
import pytest
from ruamel.yaml import YAML

from penstock.configs.errors import UserError
from penstock.launch.render.kubernetes import Pods, render

ROOT = Path(__file__).parents[3]

# Fields of ray.io/v1 that a run uses: https://ray-project.github.io/kuberay/reference/api
RAY_JOB = {
    "entrypoint": str,
    "shutdownAfterJobFinishes": bool,
    "backoffLimit": int,
    "rayClusterSpec": dict,
}
RAY_CLUSTER = {
    "rayVersion": str,
    "authOptions": dict,
    "headGroupSpec": dict,
    "workerGroupSpecs": list,
}
HEAD = {"rayStartParams": dict, "template": dict}
WORKERS = HEAD | {"groupName": str, "replicas": int, "minReplicas": int, "maxReplicas": int}


def manifests(
    *overrides: str,
    engine: Literal["ray", "none"] = "none",
    target: str = "pong",
    name: str | None = None,
    **pods: Any,
) -> list[dict[str, Any]]:
    size = Pods(**{"image": "registry.example/penstock:1", "nodes": 3, **pods})
    return list(YAML(typ="safe").load_all(render(target, overrides, size, engine, name, 60)))


def by_kind(objects: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {each["kind"]: each for each in objects}


def pod_specs(value: Any) -> Iterator[dict[str, Any]]:
    """The pods anywhere in an object."""
    if isinstance(value, dict):
        if "containers" in value:
            yield value
        for each in value.values():
            yield from pod_specs(each)
    elif isinstance(value, list):
        for each in value:
            yield from pod_specs(each)


def check_fields(value: dict[str, Any], fields: Mapping[str, type]) -> None:
    assert value.keys() <= fields.keys()
    for name, each in value.items():
        assert isinstance(each, fields[name]), name


@pytest.mark.parametrize("learners", [1, 2])
@pytest.mark.parametrize("gpus", [0, 1])
def test_plain_objects_are_valid(learners: int, gpus: int) -> None:
    objects = manifests(learners=learners, gpus=gpus)
    assert list(by_kind(objects)) == ["Service", "Job", "StatefulSet", "PodDisruptionBudget"]
    for each in objects:
        kubernetes_validate.validate(each, "1.31", strict=True)


@pytest.mark.parametrize("nodes", [1, 4])
def test_a_ray_job_has_fields_that_its_documentation_names(nodes: int) -> None:
    [job] = manifests(engine="ray", nodes=nodes, gpus=1)
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    check_fields(job["spec"], RAY_JOB)
    cluster = job["spec"]["rayClusterSpec"]
    check_fields(cluster, RAY_CLUSTER)
    assert cluster["authOptions"] == {"mode": "token"}
    pinned = (ROOT / "constraints.txt").read_text().splitlines()
    assert f"ray=={cluster['rayVersion']}" in pinned, "the image has the pinned Ray"
    check_fields(cluster["headGroupSpec"], HEAD)
    for group in cluster.get("workerGroupSpecs", []):
        check_fields(group, WORKERS)
        assert group["replicas"] == group["minReplicas"] == group["maxReplicas"] == nodes - 1
    assert len(cluster.get("workerGroupSpecs", [])) == (nodes > 1)
    # KubeRay's pods are Kubernetes' own.
    for spec in pod_specs(job):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"}, "spec": spec}
        kubernetes_validate.validate(pod, "1.31", strict=True)
    assert f"learner.count={nodes}" in job["spec"]["entrypoint"]


@pytest.mark.parametrize("engine", ["ray", "none"])
def test_no_container_runs_as_root_or_writes_outside_its_volumes(
    engine: Literal["ray", "none"],
) -> None:
    specs = list(pod_specs(manifests(engine=engine, learners=2)))
    assert len(specs) == 2
    for spec in specs:
        assert spec["securityContext"]["runAsNonRoot"]
        assert not spec["automountServiceAccountToken"]
        assert spec["terminationGracePeriodSeconds"] > 60
        for container in spec["containers"]:
            assert container["securityContext"]["readOnlyRootFilesystem"]
            assert not container["securityContext"]["allowPrivilegeEscalation"]
            assert container["resources"]["limits"] == container["resources"]["requests"]


def test_each_pod_gets_only_its_keys() -> None:
    found = by_kind(manifests())
    keys = {
        kind: {
            item["key"]
            for volume in spec["volumes"]
            for item in volume.get("secret", {}).get("items", [])
        }
        for kind in ("Job", "StatefulSet")
        for spec in pod_specs(found[kind])
    }
    assert keys["Job"] == {"learner.key", "learner.key_secret", "actor.key"}
    assert keys["StatefulSet"] == {"learner.key", "actor.key_secret"}


@pytest.mark.parametrize("engine", ["ray", "none"])
def test_options_reach_the_command_unchanged(engine: Literal["ray", "none"]) -> None:
    objects = manifests("run.callbacks=['a:B']", "run.dir=elsewhere", engine=engine, name="mine")
    command = next(
        text
        for text in (
            objects[0]["spec"].get("entrypoint", ""),
            *(
                c["command"][2]
                for s in pod_specs(objects)
                for c in s["containers"]
                if "command" in c
            ),
        )
        if "pong" in text
    )
    shell = command.replace("exec penstock", "printf '%s\\n'").replace("penstock", "printf '%s\\n'")
    words = subprocess.run(["sh", "-c", shell], capture_output=True, text=True, check=True).stdout
    assert "run.callbacks=['a:B']" in words.splitlines()
    assert "run.dir=/runs/mine" in words.splitlines()
    assert "elsewhere" not in words


@pytest.mark.parametrize(
    ("overrides", "options", "message"),
    [
        (("learner.lr=fast",), {}, "learner.lr"),
        ((), {"name": "My run"}, "--name is 'My run'; it must be at most 40 lower-case"),
        ((), {"name": "a" * 41}, "--name is"),
        ((), {"memory": "a lot"}, "--memory is 'a lot'; it must be a quantity"),
        ((), {"image": "a b"}, "--image is 'a b'; it must be a name"),
        ((), {"claim": "x\ny"}, "--claim is"),
        (
            ("learner.pace=asp",),
            {"learners": 2, "target": "cartpole"},
            "--engine none does not start; set --engine ray",
        ),
        (
            ("actors.envs=auto",),
            {"learners": 2},
            "learners on 2 hosts need the same number; set actors.envs to",
        ),
    ],
)
def test_unworkable_options_are_refused(
    overrides: tuple[str, ...], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        manifests(*overrides, **options)
