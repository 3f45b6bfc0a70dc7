"""Kubernetes manifests that train a target: a RayJob for KubeRay, or plain objects without Ray.

The plain objects are an indexed Job of learners, a StatefulSet of actors, a headless Service by
whose names the actors and the other learners find each learner, and a PodDisruptionBudget. All
containers run as another user than root, with a read-only root file system; they write to the run's
volume and to a temporary one.

Fields: https://kubernetes.io/docs/reference/kubernetes-api and
https://ray-project.github.io/kuberay/reference/api (ray.io/v1).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from penstock.configs.errors import UserError
from penstock.configs.yaml_text import write
from penstock.launch.render.command import command

Object = dict[str, Any]

USER = 1000
# Time between the end of run.grace_s and that of the pod.
MARGIN_S = 30
# Ports of a learner, for actors and for the other learners.
PORT, STORE_PORT = 7700, 29500
NAME = re.compile(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?")
QUANTITY = re.compile(r"\d+(\.\d+)?([EPTGMk]i?)?")
# Version of Ray in the image, by which KubeRay decides on authentication and probes.
RAY = "2.60.0"
# A learner whose node is lost is started again this often, and resumes each time.
RETRIES = 100
# Where a pod has the volume of the runs, and the keys.
RUNS, KEYS = "/runs", "/keys"
OF_LEARNERS = {
    "learner.key": "learner.key",
    "learner.key_secret": "learner.key_secret",
    "actor.key": "allowed/actor.key",
}
OF_ACTORS = {"learner.key": "learner.key", "actor.key_secret": "actor.key_secret"}
"""Keys of the secret by their paths in the folder of a pod's keys."""


@dataclass(frozen=True)
class Pods:
    """The resources of a run."""

    image: str
    """Container image with Penstock, and with Ray for engine "ray"."""
    nodes: int
    """Pods: of actors, or with Ray of its cluster."""
    learners: int = 1
    """Pods of learners, without Ray."""
    cpus: int = 4
    """Cores of each pod."""
    gpus: int = 0
    """GPUs of each learner's pod, or of each pod with Ray."""
    memory: str = "8Gi"
    claim: str = "penstock-runs"
    """PersistentVolumeClaim for the runs, which all pods that write to it can mount."""


def render(
    target: str,
    overrides: Sequence[str],
    pods: Pods,
    engine: Literal["ray", "none"],
    name: str | None,
    grace_s: int,
) -> str:
    """Write the manifests of a run as YAML.

    Args:
        target: target as of `penstock train`.
        overrides: options of the run, each ``key=value``; ``run.dir`` is below the volume of the
            runs.
        pods: number and resources of the pods.
        engine: "ray" for a RayJob, "none" for plain objects.
        name: name of the run and its objects; None for the target's.
        grace_s: seconds that the run has to save when its pod is to end.

    Returns: the text of the file, which begins with comments on its use.

    Raises:
        UserError: the target or an option is wrong, or does not go with these pods.
    """
    learners = pods.nodes * max(1, pods.gpus) if engine == "ray" and pods.gpus else pods.learners
    cores = pods.nodes * pods.cpus - (learners if engine == "ray" else pods.nodes)
    actors = max(1, cores // learners) * learners

    defaults = {"run.grace_s": str(grace_s), "actors.count": str(actors)}
    if pods.gpus:
        defaults["learner.device"] = "cuda"
    if engine == "ray" and pods.gpus:
        defaults["learner.count"] = str(learners)

    started = pods.learners if engine == "none" else None
    resolved, text = command(target, overrides, defaults, started, "--learners 1")
    name = _checked(name or re.sub(r"[^a-z0-9]+", "-", resolved.name.lower()).strip("-"), pods)

    if engine == "ray":
        objects, keys = [_ray_job(name, text, pods, grace_s)], ""
    else:
        objects = _plain(name, text, pods, grace_s, max(1, pods.cpus - 1))
        keys = KEYS_FIRST.format(name=name)

    # A value that occurs twice would be written as a reference; copies share nothing.
    manifests = "---\n".join(write(json.loads(json.dumps(each))) for each in objects)
    return HEADER.format(name=name, claim=pods.claim, keys=keys) + manifests


HEADER = """\
# Trains {name} by Penstock. The runs are on the PersistentVolumeClaim {claim}, which must exist.
{keys}# kubectl apply -f {name}.yaml; kubectl delete -f {name}.yaml saves and ends the run.
"""
KEYS_FIRST = """\
# First make the keys by which learners and actors know each other:
#   penstock keys new keys
#   kubectl create secret generic {name}-keys --from-file keys --from-file keys/allowed
"""


def _checked(name: str, pods: Pods) -> str:
    """Returns the name of the run; raises UserError if it or a text of ``pods`` is not valid."""
    if not NAME.fullmatch(name):
        raise UserError(
            f"--name is {name!r}; it must be at most 40 lower-case letters, digits and dashes, "
            "begin with a letter and end with no dash"
        )
    if not QUANTITY.fullmatch(pods.memory):
        raise UserError(f"--memory is {pods.memory!r}; it must be a quantity such as 8Gi")
    for option, text in (("--image", pods.image), ("--claim", pods.claim)):
        if not re.fullmatch(r"[\w./:@-]+", text):
            raise UserError(f"{option} is {text!r}; it must be a name without spaces")
    return name


def _ray_job(name: str, arguments: str, pods: Pods, grace_s: int) -> Object:
    """Returns a RayJob, whose nodes are pods of the same size.

    KubeRay executes the run's command when the cluster is up.

    Args:
        name: name of the run.
        arguments: target and options of `penstock train`, quoted for a shell.
        pods: number and resources of the pods.
        grace_s: seconds that the run has to save when its pod is to end.
    """
    container = _container("ray", pods, pods.gpus, [], f"{RUNS}")
    del container["command"]
    del container["livenessProbe"]  # KubeRay has its own
    del container["startupProbe"]

    def group(container_name: str) -> Object:
        """Returns Ray's description of pods with one container of that name."""
        spec = _pod(pods, [container | {"name": container_name}], grace_s)
        return {"rayStartParams": {"num-cpus": str(pods.cpus)}, "template": {"spec": spec}}

    workers = {"groupName": "nodes", "replicas": pods.nodes - 1}
    bounds = {"minReplicas": pods.nodes - 1, "maxReplicas": pods.nodes - 1}
    run = f"penstock train {arguments} run.dir={RUNS}/{name} --resume auto"
    cluster: Object = {
        "rayVersion": RAY,
        "authOptions": {"mode": "token"},
        "headGroupSpec": group("ray-head"),
    }
    if pods.nodes > 1:
        cluster["workerGroupSpecs"] = [workers | bounds | group("ray-worker")]

    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": {"name": name, "labels": _labels(name)},
        "spec": {
            "entrypoint": f"{run} --engine ray --address auto",
            "shutdownAfterJobFinishes": True,
            "backoffLimit": RETRIES,
            "rayClusterSpec": cluster,
        },
    }


def _plain(name: str, arguments: str, pods: Pods, grace_s: int, actors: int) -> list[Object]:
    """Returns the objects of a run without Ray: service, learners, actors and disruption budget.

    Args:
        name: name of the run.
        arguments: target and options of `penstock learner`, quoted for a shell.
        pods: number and resources of the pods.
        grace_s: seconds that a learner has to save when its pod is to end.
        actors: number of actors in each of their pods.
    """
    learner = f"{name}-learner"
    trains = _learner_container(name, arguments, pods)
    plays = _actors_container(name, pods, actors)
    return [
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": learner, "labels": _labels(name)},
            "spec": {
                "clusterIP": "None",
                "publishNotReadyAddresses": True,  # learners meet before they are ready
                "selector": _labels(name) | {"role": "learner"},
                "ports": [{"name": "actors", "port": PORT}],
            },
        },
        {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {"name": learner, "labels": _labels(name)},
            "spec": {
                "completionMode": "Indexed",
                "completions": pods.learners,
                "parallelism": pods.learners,
                "backoffLimit": RETRIES,
                "template": _template(
                    name, "learner", _pod(pods, [trains], grace_s, name, OF_LEARNERS, learner)
                ),
            },
        },
        {
            "apiVersion": "apps/v1",
            "kind": "StatefulSet",
            "metadata": {"name": f"{name}-actors", "labels": _labels(name)},
            "spec": {
                "serviceName": learner,
                "replicas": pods.nodes,
                "podManagementPolicy": "Parallel",
                "selector": {"matchLabels": _labels(name) | {"role": "actors"}},
                "template": _template(
                    name, "actors", _pod(pods, [plays], grace_s, name, OF_ACTORS, None)
                ),
            },
        },
        {
            "apiVersion": "policy/v1",
            "kind": "PodDisruptionBudget",
            "metadata": {"name": learner, "labels": _labels(name)},
            "spec": {
                "minAvailable": pods.learners,  # no learner is evicted to empty a node
                "selector": {"matchLabels": _labels(name) | {"role": "learner"}},
            },
        },
    ]


def _learner_container(name: str, arguments: str, pods: Pods) -> Object:
    """Returns the container of one learner, whose rank is the index of its pod in the Job."""
    # Several learners meet at the first.
    place = ""
    if pods.learners > 1:
        host = f"{name}-learner-0.{name}-learner"
        store = f"--world {pods.learners} --store {host}:{STORE_PORT} --trusted-network"
        place = f' --rank "$JOB_COMPLETION_INDEX" {store}'

    # The first learner writes to the run's folder, the others to a folder below it.
    own = (
        f'run={RUNS}/{name}; [ "$JOB_COMPLETION_INDEX" = 0 ] || run=$run/rank-$JOB_COMPLETION_INDEX'
    )

    learn = (
        f"exec penstock learner {arguments} run.dir={RUNS}/{name} transport.curve={KEYS}"
        f" --bind tcp://0.0.0.0:{PORT} --resume auto{place}"
    )
    probe = f"{own}; exec penstock status $run --probe"
    return _container("learner", pods, pods.gpus, ["sh", "-c", learn], probe)


def _actors_container(name: str, pods: Pods, actors: int) -> Object:
    """Returns the container of some actors, which join the learner of their pod's number."""
    learner = f"{name}-learner"
    play = (
        f"rank=$((${{HOSTNAME##*-}} % {pods.learners})); exec penstock actor --curve {KEYS}"
        f" --connect tcp://{learner}-$rank.{learner}:$(({PORT} + rank))"
        f" --count {actors} --dir /tmp/actors"
    )
    probe = "exec penstock status /tmp/actors --probe"
    return _container("actors", pods, 0, ["sh", "-c", play], probe)


def _labels(name: str) -> Object:
    """Returns the labels of all objects of a run."""
    return {"app.kubernetes.io/name": "penstock", "app.kubernetes.io/instance": name}


def _template(name: str, role: str, spec: Object) -> Object:
    """Returns the template of pods whose role, "learner" or "actors", is one of their labels."""
    return {"metadata": {"labels": _labels(name) | {"role": role}}, "spec": spec}


def _container(name: str, pods: Pods, gpus: int, command: list[str], probe: str) -> Object:
    """Returns a container whose process may write to its volumes only.

    Args:
        name: name of the container.
        pods: its image, cores and memory.
        gpus: number of its GPUs.
        command: what it executes.
        probe: a command for a shell, which fails if the container has to be started again.
    """
    resources: Object = {"cpu": str(pods.cpus), "memory": pods.memory}
    if gpus:
        resources["nvidia.com/gpu"] = str(gpus)

    check = {"exec": {"command": ["sh", "-c", probe]}, "periodSeconds": 30, "timeoutSeconds": 15}
    mounts = [{"name": "runs", "mountPath": RUNS}, {"name": "tmp", "mountPath": "/tmp"}]
    return {
        "name": name,
        "image": pods.image,
        "command": command,
        "env": [{"name": "HOME", "value": "/tmp"}],
        "resources": {"requests": resources, "limits": resources},
        "startupProbe": check | {"periodSeconds": 10, "failureThreshold": 60},
        "livenessProbe": check | {"failureThreshold": 4},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": mounts,
    }


def _pod(
    pods: Pods,
    containers: list[Object],
    grace_s: int,
    name: str | None = None,
    keys: Mapping[str, str] | None = None,
    subdomain: str | None = None,
) -> Object:
    """Returns the specification of a pod.

    Args:
        pods: names the volume of the runs.
        containers: the pod's containers.
        grace_s: seconds that its processes have to save when it is to end.
        name: name of the run, whose secret has the keys.
        keys: the keys that the pod gets under `KEYS`, by their names in the secret, each with its
            path there; None for a pod of Ray, which has none.
        subdomain: name of the service by which others find a learner's pod; None for other pods.
    """
    volumes: list[Object] = [
        {"name": "runs", "persistentVolumeClaim": {"claimName": pods.claim}},
        {"name": "tmp", "emptyDir": {}},
    ]
    if keys:
        items = [{"key": key, "path": path} for key, path in keys.items()]
        secret = {"secretName": f"{name}-keys", "items": items, "defaultMode": 0o440}
        volumes.append({"name": "keys", "secret": secret})
        mount = {"name": "keys", "mountPath": KEYS, "readOnly": True}
        containers = [c | {"volumeMounts": [*c["volumeMounts"], mount]} for c in containers]

    pod: Object = {
        "containers": containers,
        "volumes": volumes,
        "terminationGracePeriodSeconds": grace_s + MARGIN_S,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "automountServiceAccountToken": False,
    }

    if keys:
        pod["restartPolicy"] = "OnFailure" if subdomain else "Always"
    if subdomain:
        pod["subdomain"] = subdomain
    return pod
