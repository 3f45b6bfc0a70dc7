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
from penstock.launch.render.command import make_command

Object = dict[str, Any]

USER = 1000
"""Id of the user and group of all processes."""
MARGIN_S = 30
"""Time between the end of run.grace_s and that of the pod."""
PORT = 7700
"""Port of a learner for actors."""
STORE_PORT = 29500
"""Port of the first learner for the other learners."""
NAME = re.compile(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?")
QUANTITY = re.compile(r"\d+(\.\d+)?([EPTGMk]i?)?")
RAY = "2.60.0"
"""Version of Ray in the image, by which KubeRay decides on authentication and probes."""
RETRIES = 100
"""A learner whose node is lost is started again this often, and resumes each time."""
RUNS = "/runs"
"""Where a pod has the volume of the runs."""
KEYS = "/keys"
"""Where a pod has its keys."""
LEARNER_KEYS = {
    "learner.key": "learner.key",
    "learner.key_secret": "learner.key_secret",
    "actor.key": "allowed/actor.key",
}
"""The entries of the secret that a learner's pod gets, with their paths in `KEYS`."""
ACTOR_KEYS = {"learner.key": "learner.key", "actor.key_secret": "actor.key_secret"}
"""The entries of the secret that a pod of actors gets, with their paths in `KEYS`."""


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
    on_ray = engine == "ray"
    learners = pods.learners
    if on_ray and pods.gpus:
        learners = pods.nodes * pods.gpus

    # With Ray learners and actors share the pods, and each learner needs a core; without it a pod
    # of actors keeps one core for the rest. Every learner has as many actors.
    busy_cores = learners if on_ray else pods.nodes
    actor_cores = pods.nodes * pods.cpus - busy_cores
    actors = max(1, actor_cores // learners) * learners

    defaults = {"run.grace_s": str(grace_s), "actors.count": str(actors)}
    if pods.gpus:
        defaults["learner.device"] = "cuda"
    if on_ray and pods.gpus:
        defaults["learner.count"] = str(learners)

    resolved, arguments = make_command(
        target,
        overrides,
        defaults,
        learners=None if on_ray else pods.learners,
        one_learner="--learners 1",
    )
    if not name:
        name = re.sub(r"[^a-z0-9]+", "-", resolved.name.lower()).strip("-")
    _check_texts(name, pods)

    if on_ray:
        objects = [_ray_job(name, arguments, pods, grace_s)]
        keys_comment = ""
    else:
        actors_per_pod = max(1, pods.cpus - 1)
        objects = _plain_objects(name, arguments, pods, grace_s, actors_per_pod)
        keys_comment = KEYS_COMMENT.format(name=name)

    # A value that occurs twice would be written as a reference; copies share nothing.
    manifests = "---\n".join(write(json.loads(json.dumps(each))) for each in objects)
    return HEADER.format(name=name, claim=pods.claim, keys=keys_comment) + manifests


HEADER = """\
# Trains {name} by Penstock. The runs are on the PersistentVolumeClaim {claim}, which must exist.
{keys}# kubectl apply -f {name}.yaml; kubectl delete -f {name}.yaml saves and ends the run.
"""
KEYS_COMMENT = """\
# First make the keys by which learners and actors know each other:
#   penstock keys new keys
#   kubectl create secret generic {name}-keys --from-file keys --from-file keys/allowed
"""


def _check_texts(name: str, pods: Pods) -> None:
    """Raise UserError if the name of the run or a text of ``pods`` is not valid."""
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


def _ray_job(name: str, arguments: str, pods: Pods, grace_s: int) -> Object:
    """Returns a RayJob, whose nodes are pods of the same size.

    KubeRay executes the run's command when the cluster is up.

    Args:
        name: name of the run.
        arguments: target and options of `penstock train`, quoted for a shell.
        pods: number and resources of the pods.
        grace_s: seconds that the run has to save when its pod is to end.
    """
    container = _container("ray", pods, pods.gpus, command=[], probe="")
    # KubeRay has a command and probes of its own.
    for field in ("command", "livenessProbe", "startupProbe"):
        del container[field]

    def group(container_name: str) -> Object:
        """Returns Ray's description of pods with one container of that name."""
        spec = _pod(pods, container | {"name": container_name}, grace_s)
        return {"rayStartParams": {"num-cpus": str(pods.cpus)}, "template": {"spec": spec}}

    cluster: Object = {
        "rayVersion": RAY,
        "authOptions": {"mode": "token"},
        "headGroupSpec": group("ray-head"),
    }
    workers = pods.nodes - 1
    if workers > 0:
        replicas = {"replicas": workers, "minReplicas": workers, "maxReplicas": workers}
        cluster["workerGroupSpecs"] = [
            {"groupName": "nodes"} | replicas | group("ray-worker"),
        ]

    run = f"penstock train {arguments} run.dir={RUNS}/{name} --resume auto"
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


def _plain_objects(
    name: str, arguments: str, pods: Pods, grace_s: int, actors_per_pod: int
) -> list[Object]:
    """Returns the objects of a run without Ray: service, learners, actors and disruption budget.

    Args:
        name: name of the run.
        arguments: target and options of `penstock learner`, quoted for a shell.
        pods: number and resources of the pods.
        grace_s: seconds that a learner has to save when its pod is to end.
        actors_per_pod: number of actors in each of their pods.
    """
    return [
        _learner_service(name),
        _learner_job(name, arguments, pods, grace_s),
        _actor_set(name, pods, grace_s, actors_per_pod),
        _disruption_budget(name, pods.learners),
    ]


def _learner_service(name: str) -> Object:
    """Returns the headless Service by whose names actors and other learners find each learner."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": f"{name}-learner", "labels": _labels(name)},
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,  # learners meet before they are ready
            "selector": _role_labels(name, "learner"),
            "ports": [{"name": "actors", "port": PORT}],
        },
    }


def _learner_job(name: str, arguments: str, pods: Pods, grace_s: int) -> Object:
    """Returns the indexed Job of learners, whose pods have an index each, the learner's rank."""
    learner = f"{name}-learner"
    container = _learner_container(name, arguments, pods)
    pod = _pod(pods, container, grace_s, secret=f"{name}-keys", keys=LEARNER_KEYS)
    pod |= {"restartPolicy": "OnFailure", "subdomain": learner}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": learner, "labels": _labels(name)},
        "spec": {
            "completionMode": "Indexed",
            "completions": pods.learners,
            "parallelism": pods.learners,
            "backoffLimit": RETRIES,
            "template": _template(name, "learner", pod),
        },
    }


def _actor_set(name: str, pods: Pods, grace_s: int, actors_per_pod: int) -> Object:
    """Returns the StatefulSet of actors."""
    container = _actors_container(name, pods, actors_per_pod)
    pod = _pod(pods, container, grace_s, secret=f"{name}-keys", keys=ACTOR_KEYS)
    pod |= {"restartPolicy": "Always"}
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": {"name": f"{name}-actors", "labels": _labels(name)},
        "spec": {
            "serviceName": f"{name}-learner",
            "replicas": pods.nodes,
            "podManagementPolicy": "Parallel",
            "selector": {"matchLabels": _role_labels(name, "actors")},
            "template": _template(name, "actors", pod),
        },
    }


def _disruption_budget(name: str, learners: int) -> Object:
    """Returns the PodDisruptionBudget by which no learner is evicted to empty a node.

    Actors may be.
    """
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": {"name": f"{name}-learner", "labels": _labels(name)},
        "spec": {
            "minAvailable": learners,
            "selector": {"matchLabels": _role_labels(name, "learner")},
        },
    }


def _learner_container(name: str, arguments: str, pods: Pods) -> Object:
    """Returns the container of one learner, whose rank is the index of its pod in the Job."""
    # Several learners meet at the first.
    group_options = ""
    if pods.learners > 1:
        first_host = f"{name}-learner-0.{name}-learner"
        group_options = (
            f' --rank "$JOB_COMPLETION_INDEX" --world {pods.learners}'
            f" --store {first_host}:{STORE_PORT} --trusted-network"
        )
    learner_command = (
        f"exec penstock learner {arguments} run.dir={RUNS}/{name} transport.curve={KEYS}"
        f" --bind tcp://0.0.0.0:{PORT} --resume auto{group_options}"
    )

    # The first learner writes to the run's folder, the others to a folder below it.
    set_run_folder = (
        f'run={RUNS}/{name}; [ "$JOB_COMPLETION_INDEX" = 0 ] || run=$run/rank-$JOB_COMPLETION_INDEX'
    )
    return _container(
        "learner",
        pods,
        pods.gpus,
        command=["sh", "-c", learner_command],
        probe=f"{set_run_folder}; exec penstock status $run --probe",
    )


def _actors_container(name: str, pods: Pods, actors: int) -> Object:
    """Returns the container of some actors, which join the learner of their pod's number.

    Where there are more pods than learners, they are divided among the learners.
    """
    learner = f"{name}-learner"
    actor_command = (
        f"rank=$((${{HOSTNAME##*-}} % {pods.learners})); exec penstock actor --curve {KEYS}"
        f" --connect tcp://{learner}-$rank.{learner}:$(({PORT} + rank))"
        f" --count {actors} --dir /tmp/actors"
    )
    return _container(
        "actors",
        pods,
        gpus=0,
        command=["sh", "-c", actor_command],
        probe="exec penstock status /tmp/actors --probe",
    )


def _labels(name: str) -> Object:
    """Returns the labels of all objects of a run."""
    return {"app.kubernetes.io/name": "penstock", "app.kubernetes.io/instance": name}


def _role_labels(name: str, role: str) -> Object:
    """Returns the labels of a run's pods of one role, "learner" or "actors"."""
    return _labels(name) | {"role": role}


def _template(name: str, role: str, spec: Object) -> Object:
    """Returns the template of a run's pods of one role."""
    return {"metadata": {"labels": _role_labels(name, role)}, "spec": spec}


def _container(name: str, pods: Pods, gpus: int, *, command: list[str], probe: str) -> Object:
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
    container: Object,
    grace_s: int,
    *,
    secret: str = "",
    keys: Mapping[str, str] | None = None,
) -> Object:
    """Returns the specification of a pod.

    Args:
        pods: names the volume of the runs.
        container: the only container of the pod.
        grace_s: seconds that its processes have to save when it is to end.
        secret: name of the secret with the run's keys.
        keys: the entries of the secret that the pod gets under `KEYS`, each with its path there;
            None for a pod of Ray, which needs no keys.
    """
    volumes: list[Object] = [
        {"name": "runs", "persistentVolumeClaim": {"claimName": pods.claim}},
        {"name": "tmp", "emptyDir": {}},
    ]
    if keys:
        items = [{"key": key, "path": path} for key, path in keys.items()]
        source = {"secretName": secret, "items": items, "defaultMode": 0o440}
        volumes.append({"name": "keys", "secret": source})
        mount = {"name": "keys", "mountPath": KEYS, "readOnly": True}
        container = container | {"volumeMounts": [*container["volumeMounts"], mount]}

    return {
        "containers": [container],
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
