"""The commands of the containers of rendered manifests, executed with folders as volumes."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from penstock.launch.render.kubernetes import Pods, render
from penstock.transport.zmq.keys import make_keys
from train_command import WAIT_S, assert_balanced, metrics
from waiting import wait_until

pytestmark = pytest.mark.system

PORT = 27700  # instead of 7700, which may be in use here
OPTIONS = ("stop.return=null", "stop.minutes=5", "eval.every_steps=null", "run.interval_s=0.1")


class Pod:
    """One pod of a manifest, whose volumes are folders."""

    def __init__(self, folder: Path, manifest: dict[str, Any], number: int, keys: Path) -> None:
        self._folder = folder
        self._spec = manifest["spec"]["template"]["spec"]
        [self._container] = self._spec["containers"]
        for name in ("runs", "tmp"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        [secret] = [v["secret"] for v in self._spec["volumes"] if "secret" in v]
        for item in secret["items"]:
            source = next(
                p for p in (keys / item["key"], keys / "allowed" / item["key"]) if p.exists()
            )
            path = folder / "keys" / item["path"]
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, path)
        name = f"{manifest['metadata']['name']}-{number}"
        self._environment = {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "HOSTNAME": name,
            "JOB_COMPLETION_INDEX": str(number),
        }

    def _here(self, text: str) -> str:
        text = re.sub(r"(?<!\w)/(runs|keys|tmp)(?=[/ ])", rf"{self._folder}/\1", text)
        text = text.replace("tcp://game-learner-$rank.game-learner", "tcp://127.0.0.1")
        return text.replace("0.0.0.0", "127.0.0.1").replace("7700", str(PORT))

    @contextmanager
    def runs(self) -> Iterator[subprocess.Popen[str]]:
        words = [self._here(word) for word in self._container["command"]]
        log = self._folder / "log"
        with log.open("w") as out:
            process = subprocess.Popen(
                words, env=self._environment, stdout=out, stderr=out, text=True
            )
        try:
            yield process
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(WAIT_S)

    def lives(self) -> bool:
        probe = self._container["livenessProbe"]["exec"]["command"]
        words = [self._here(word) for word in probe]
        return subprocess.run(words, env=self._environment, check=False).returncode == 0


def test_learner_and_actors_train_and_answer_their_probes(tmp_path: Path) -> None:
    pods = Pods("image", nodes=1, cpus=2)
    text = render("cartpole", OPTIONS, pods, "none", "game", 20)
    found = {each["kind"]: each for each in YAML(typ="safe").load_all(text)}
    make_keys(tmp_path / "keys")
    learner = Pod(tmp_path / "learner", found["Job"], 0, tmp_path / "keys")
    actors = Pod(tmp_path / "actors", found["StatefulSet"], 0, tmp_path / "keys")
    run_dir = tmp_path / "learner" / "runs" / "game"
    assert not learner.lives()
    with actors.runs(), learner.runs() as process:
        started = run_dir / "metrics.jsonl"
        wait_until(lambda: started.exists() and len(metrics(run_dir)) > 3, WAIT_S, every_s=0.1)
        assert learner.lives()
        assert actors.lives()
        process.send_signal(signal.SIGTERM)  # as Kubernetes ends a pod
        assert process.wait(WAIT_S) == 143
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["trained_steps"] > 0
    assert_balanced(summary)
