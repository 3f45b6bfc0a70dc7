"""The Dockerfile, built by buildah on a Debian that mmdebstrap makes. Needs root and a network."""

from __future__ import annotations

import os
import shutil
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MISSING = [name for name in ("buildah", "mmdebstrap") if shutil.which(name) is None]
pytestmark = [
    pytest.mark.system,
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(bool(MISSING) or os.geteuid() != 0, reason=f"needs root and {MISSING}"),
]
PACKAGES = "python3,python3-venv,make,ca-certificates,passwd"
BASE = "localhost/penstock-base"


class Store:
    """Images in a folder of their own."""

    def __init__(self, folder: Path) -> None:
        self._where = ["--root", str(folder / "store"), "--runroot", str(folder / "run")]

    def __call__(self, command: str, *arguments: str) -> str:
        words = ["buildah", *self._where, "--storage-driver", "vfs", command, *arguments]
        environment = os.environ | {"BUILDAH_ISOLATION": "chroot"}
        made = subprocess.run(words, capture_output=True, text=True, check=False, env=environment)
        assert made.returncode == 0, made.stderr[-3000:]
        return made.stdout.strip()


@pytest.fixture
def buildah(tmp_path: Path) -> Iterator[Store]:
    """With the image `BASE`."""
    store, archive = Store(tmp_path), tmp_path / "base.tar"
    debian = ["mmdebstrap", "--quiet", "--variant=minbase", f"--include={PACKAGES}", "bookworm"]
    subprocess.run([*debian, str(archive)], check=True)
    made = store("from", "scratch")
    store("add", "--quiet", made, str(archive), "/")
    archive.unlink()
    store("commit", "--quiet", "--rm", made, BASE)
    yield store
    shutil.rmtree(tmp_path / "store")


def test_the_image_trains_as_another_user_than_root(buildah: Store, tmp_path: Path) -> None:
    subprocess.run(["git", "clone", "-q", str(ROOT), str(tmp_path / "context")], check=True)
    # Packages come from where this host gets them.
    bundle = ssl.get_default_verify_paths().cafile
    mounts = [f"{bundle}:/etc/ssl/certs/ca-certificates.crt:ro"] if bundle else []
    if Path("/etc/pip.conf").exists():
        mounts.append("/etc/pip.conf:/etc/pip.conf:ro")
    volumes = [word for mount in mounts for word in ("-v", mount)]
    base = ["--pull-never", "--build-arg", f"BASE={BASE}"]
    buildah("build", *base, *volumes, "-t", "penstock", str(tmp_path / "context"))
    made = buildah("from", "--pull-never", "localhost/penstock")
    assert buildah("run", made, "--", "id", "-u") == "1000"
    options = ["run.dir=/tmp/run", "stop.env_steps=20000"]
    said = buildah("run", made, "--", "penstock", "train", "cartpole", *options)
    assert "ended by" in said
    assert buildah("run", made, "--", "ray", "--version").startswith("ray, version")
