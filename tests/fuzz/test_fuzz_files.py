"""Files from elsewhere: checkpoints, exported policies, snapshots, keys, configs, files of a run.

What is read is used, too: weights by a network, rows by a sampler, keys by a socket, rows of a
table by its printer.
"""

from __future__ import annotations

import json
import struct
import zlib
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import zmq
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors.numpy import save as to_bytes

from mutations import bounded, changed, cut, flipped, fuzzed, only, values
from penstock import load_policy
from penstock.algos.samples import network_shape
from penstock.configs.errors import UserError
from penstock.configs.load import dump, resolve
from penstock.core.params import ParamLayout
from penstock.envs import make
from penstock.launch.machines import find_place
from penstock.learner.checkpoints import checkpoint_format, exported
from penstock.learner.checkpoints.checkpoint_format import Checkpoint
from penstock.monitor import runs
from penstock.monitor.compare import compare, describe
from penstock.monitor.plot import plot
from penstock.monitor.run_folder.checkpoints import best as best_of
from penstock.monitor.run_folder.lines import objects
from penstock.monitor.run_folder.record import METRICS
from penstock.replay import Prioritized, Replay, ReplayError
from penstock.transport.zmq import keys
from penstock.transport.zmq.sockets import dealer
from penstock.watch.freeze import report_page

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::UserWarning")
refused = only(UserError)
DEEP_JSON = "[" * 100_000 + "]" * 100_000
JSON_EXTREMES = [
    "NaN",
    "Infinity",
    "-Infinity",
    "1e400",
    "9" * 5000,
    '"\\ud800"',
    "{}",
    "",
    "[",
    "0",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("files")


def broken(data: bytes) -> st.SearchStrategy[bytes]:
    """Bytes with some changed, cut off, or doubled."""

    @st.composite
    def draw_broken(draw: st.DrawFn) -> bytes:
        return (flipped if draw(st.booleans()) else cut)(data, draw)

    return draw_broken()


def texts(value: Any) -> st.SearchStrategy[str]:
    """JSON that is nearly that of ``value``."""
    sound = json.dumps(value)
    return (
        changed(value).map(_json)
        | st.sampled_from([*JSON_EXTREMES, DEEP_JSON])
        | st.sampled_from(JSON_EXTREMES).map(lambda text: sound.replace("1", text, 1))
    )


def _json(value: Any) -> str:
    return json.dumps(value, default=str)


# --------------------------------------------------------------------------------- checkpoints

CONFIG = resolve("CartPole-v1", ["actors.envs=2"])


@cache
def _game() -> Any:
    game = make(CONFIG.env, 1)
    game.close()
    return game


@cache
def _policy_parts() -> tuple[dict[str, Any], dict[str, Any]]:
    """What an exported policy says of itself, and its tensors."""
    name = f"fuzz-policy-{struct.pack('d', np.random.random()).hex()}.safetensors"
    path = Path("/tmp") / name
    info = _game().info
    layout = network_shape(CONFIG, info).layout
    exported.write(path, CONFIG, _game().info.spaces, info, np.zeros(layout.size, np.float32))
    data = path.read_bytes()
    path.unlink()
    (nbytes,) = struct.unpack("<Q", data[:8])
    about = json.loads(json.loads(data[8 : 8 + nbytes])["__metadata__"][exported.KEY])
    views = layout.views(np.zeros(layout.size, np.float32))
    return about, {name: np.ascontiguousarray(array) for name, array in views.items()}


@fuzzed(cost=2)
@given(data=st.data())
def test_an_exported_policy_acts_or_is_refused(folder: Path, data: st.DataObject) -> None:
    about, tensors = _policy_parts()
    how = data.draw(st.sampled_from(["about", "about", "bytes", "tensor"]))
    if how == "about":
        made = to_bytes(tensors, {exported.KEY: data.draw(texts(about))})
    elif how == "tensor":
        made = to_bytes(_strange_tensors(tensors, data), {exported.KEY: json.dumps(about)})
    else:
        made = data.draw(broken(to_bytes(tensors, {exported.KEY: json.dumps(about)})))
    path = folder / "policy"
    path.write_bytes(made)

    def use() -> None:
        policy = load_policy(path)
        policy(policy.observation_space.sample())

    with bounded():
        refused(use)


def _strange_tensors(tensors: dict[str, Any], data: st.DataObject) -> dict[str, Any]:
    made = dict(tensors)
    name = data.draw(st.sampled_from(sorted(made)))
    del made[name]
    how = data.draw(st.sampled_from(["gone", "renamed", "shape", "dtype", "values", "more"]))
    array = tensors[name]
    if how == "renamed":
        made[data.draw(st.text(max_size=5)) or "x"] = array
    elif how == "shape":
        made[name] = np.zeros(data.draw(st.lists(st.integers(0, 3), max_size=3)), array.dtype)
    elif how == "dtype":
        made[name] = array.astype(data.draw(st.sampled_from(["f8", "f2", "i8", "u1", "?"])))
    elif how == "values":
        made[name] = np.full_like(array, data.draw(st.sampled_from([np.nan, np.inf, 3e38])))
    elif how == "more":
        made |= {name: array, "extra": np.zeros(3)}
    return made


LAYOUT = ParamLayout((("w", (3, 2)), ("b", (2,))))
META = {"progress": {"trained_steps": 1}, "best_return": 1.0, "spec": {}}
SOUND_ABOUT = {"format": 1, "layout": LAYOUT.to_list(), "meta": META}
SOUND_TENSORS: dict[str, npt.NDArray[Any]] = {
    "model/w": np.zeros((3, 2), np.float32),
    "model/b": np.zeros(2, np.float32),
    "state/random/cpu": np.zeros(4, np.uint8),
}


@fuzzed(cost=0.5)
@given(data=st.data(), wanted=st.sampled_from([None, LAYOUT]))
def test_a_checkpoint_is_whole_or_refused(
    folder: Path, data: st.DataObject, wanted: ParamLayout | None
) -> None:
    how = data.draw(st.sampled_from(["about", "about", "bytes", "tensor", "save"]))
    place = folder / "checkpoint"
    place.mkdir(exist_ok=True)
    state = Checkpoint(LAYOUT, np.ones(8, np.float32), {"x": np.arange(4)}, META)
    checkpoint_format.save(place, state)
    path = place / checkpoint_format.FILE
    if how == "bytes":
        path.write_bytes(data.draw(broken(path.read_bytes())))
    elif how == "about":
        text = data.draw(texts(SOUND_ABOUT))
        path.write_bytes(to_bytes(SOUND_TENSORS, {"penstock": text}))
    elif how == "tensor":
        tensors = _strange_tensors(SOUND_TENSORS, data)
        path.write_bytes(to_bytes(tensors, {"penstock": json.dumps(SOUND_ABOUT)}))

    def use() -> None:
        meta = checkpoint_format.read_meta(place, wanted)
        found = checkpoint_format.load(place)
        assert found.weights.shape == (found.layout.size,)
        assert found.weights.dtype == np.float32
        assert dict(found.meta) == dict(meta) or found.meta != found.meta
        if how == "bytes":
            np.testing.assert_array_equal(found.weights, np.ones(8), "a flipped bit was read")
            np.testing.assert_array_equal(found.arrays["x"], np.arange(4))

    with bounded():
        refused(use)
        best = best_of(place.parent)
    assert best is None or best.mean is None or isinstance(best.mean, int | float)


# ----------------------------------------------------------------------------------- snapshots


@cache
def _snapshot(prioritized: bool) -> dict[str, bytes]:
    """The files of a sound snapshot, by their path below its folder."""
    import tempfile

    sampler = {"sampler": Prioritized()} if prioritized else {}
    with tempfile.TemporaryDirectory() as name:
        replay = _replay(**sampler)
        for step in range(20):
            _add(replay, step)
        replay.save(name)
        replay.close()
        paths = [path for path in Path(name).rglob("*") if path.is_file()]
        return {str(path.relative_to(name)): path.read_bytes() for path in paths}


def _replay(**options: Any) -> Replay:
    return Replay(
        {"obs": ("<f4", (2,)), "action": ("<i8", ())}, 64, envs=2, unroll=4, n_step=2, seed=0,
        **options,
    )  # fmt: skip


def _add(replay: Replay, step: int) -> None:
    obs = np.full((2, 2), step, np.float32)
    flags = np.zeros(2, bool)
    replay.add(
        obs=obs, action=np.zeros(2, np.int64), reward=np.ones(2, np.float32),
        terminated=flags, truncated=flags, next_obs=obs + 1,
    )  # fmt: skip


@fuzzed(cost=1)
@given(data=st.data(), prioritized=st.booleans())
def test_a_snapshot_is_sampled_from_or_refused(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, prioritized: bool
) -> None:
    """Checksums are those of what is written: an attacker computes them, too."""
    files = dict(_snapshot(prioritized))
    whole = json.loads(files["replay.json"])
    body = json.loads(whole["body"])
    how = data.draw(st.sampled_from(["body", "body", "array", "array", "bytes", "manifest"]))
    if how == "array":
        name = data.draw(st.sampled_from(sorted(body["files"])))
        path = f"{body['folder']}/{name}.bin"
        if files[path]:
            files[path] = data.draw(_same_size(files[path]))
            body["files"][name]["crc32"] = zlib.crc32(files[path])
    elif how == "bytes":
        path = data.draw(st.sampled_from(sorted(files)))
        files[path] = data.draw(broken(files[path]))
    if how in ("body", "array"):
        text = data.draw(texts(body)) if how == "body" else json.dumps(body)
        files["replay.json"] = json.dumps(
            {"format": 1, "crc32": zlib.crc32(text.encode(errors="replace")), "body": text}
        ).encode()
    elif how == "manifest":
        files["replay.json"] = data.draw(texts(whole)).encode(errors="replace")
    place = tmp_path_factory.mktemp("snapshot")
    for name, content in files.items():
        (place / name).parent.mkdir(exist_ok=True)
        (place / name).write_bytes(content)

    def use() -> None:
        replay = Replay.load(place)
        try:
            if len(replay):
                batch = replay.sample(4)
                replay.update_priorities(batch.keys, np.ones(4))
            for step in range(40):  # all that was loaded leaves
                _add(replay, step)
            replay.sample(4)
        finally:
            replay.close()

    with bounded():
        only(ReplayError, UserError)(use)


def _same_size(sound: bytes) -> st.SearchStrategy[bytes]:
    word = st.sampled_from([0, 1, 2, 7, 63, 64, 2**31 - 1, 2**31, 2**32 - 1]).map(
        lambda n: struct.pack("<I", n)
    )
    return (
        word.map(lambda w: (w * (len(sound) // 4 + 1))[: len(sound)])
        | st.composite(lambda draw: flipped(sound, draw))()
    )


# ---------------------------------------------------------------------------------------- keys


@fuzzed(cost=2)
@given(data=st.data())
def test_keys_open_a_socket_or_are_refused(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    place = tmp_path_factory.mktemp("keys")
    for path in keys.make_keys(place):
        if data.draw(st.booleans()):
            sound = path.read_bytes()
            path.write_bytes(
                data.draw(
                    broken(sound)
                    | st.sampled_from([b'public-key = ""', b"\xff\xfe", b"metadata\ncurve\n"])
                    | st.sampled_from([b'public-key = "a"', b'public-key = "' + b"\\" * 40 + b'"'])
                )
            )
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()

    def use() -> None:
        found = keys.load_learner(place)
        assert found.allowed
        dealer(context, "tcp://127.0.0.1:9", keys.load_actor(place)).close(0)

    try:
        refused(use)
    finally:
        context.term()


# ------------------------------------------------------------------------------------- configs

LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{chr(98 + i)}: &{chr(98 + i)} [{', '.join('*' + chr(97 + i) for _ in range(9))}]\n"
    for i in range(9)
)
SOUND_YAML = dump(resolve("cartpole"))
YAML = st.sampled_from(
    [
        "&a [*a]",
        "{a: 1, a: 2}",
        "? [1]\n: 2",
        "!!python/object:os.system x",
        "[" * 3000,
        "{" * 3000,
        "\0",
        "\x85",
        "- " * 3000 + "1",
        "1e400",
        ".inf",
        ".nan",
        "0o9",
        "0x",
        "1_000",
        "2020-01-01",
        "9" * 5000,
        "~",
        "%YAML 9.9\n---\na: 1",
        "--- 1\n--- 2",
        "*a",
        "env: *a",
        "a: b: c",
    ]
)
LINES = SOUND_YAML.splitlines()


@fuzzed(cost=2)
@given(data=st.data())
@example(data=None)
def test_a_config_is_valid_or_refused(folder: Path, data: st.DataObject | None) -> None:
    path = folder / "config.yaml"
    overrides: list[str] = []
    if data is None:
        path.write_text(LAUGHS)
    else:
        lines = list(LINES)
        for _ in range(data.draw(st.integers(0, 2))):
            at = data.draw(st.integers(0, len(lines) - 1))
            key = lines[at].partition(":")[0]
            value = data.draw(YAML | values(max_leaves=3).map(_json) | st.text(max_size=8))
            lines[at] = data.draw(st.sampled_from([f"{key}: {value}", value, f"  {lines[at]}"]))
        path.write_bytes("\n".join(lines).encode(errors="surrogatepass"))
        overrides = data.draw(st.lists(_overrides, max_size=2))

    def use() -> None:
        config = resolve(str(path), overrides)
        dump(config)

    with bounded():
        refused(use)
        runs.row(folder)


_names = st.sampled_from(
    [
        "actors.envs",
        "run.seed",
        "env.kwargs",
        "env.id",
        "algo.name",
        "model.hidden",
        "actors",
        "",
        "learner.batch_slots",
        "transport.bind",
        "env.wrappers",
        "a.b.c.d",
        "....",
        "run.dir",
    ]
)
_overrides = st.builds(
    "{}={}".format, _names, YAML | st.text(max_size=8) | values(max_leaves=3).map(_json)
) | st.text(max_size=8)


# ----------------------------------------------------------------------------- files of a run

LINE = {
    "time_s": 1.0, "env_steps": 1, "trained_steps": 1, "episode_return_mean": 1.0,
    "steps_per_s": 1.0, "policy_lag_mean": 1.0, "learner_wait_fraction": 0.1, "interval_s": 1.0,
    "exit_reason": "stopped", "eval_return_best": 1.0, "return": {"mean": 1.0}, "host": "here",
    "socket": "/nowhere/supervisor.sock",
}  # fmt: skip
RUN_FILES = [METRICS, "evaluations.jsonl", "summary.json", "supervisor.json"]


@fuzzed(cost=0.7)
@given(written=st.dictionaries(st.sampled_from(RUN_FILES), st.lists(texts(LINE), max_size=3)))
@example({"summary.json": [DEEP_JSON]})
@example({METRICS: [DEEP_JSON, "{}"]})
@example({"supervisor.json": ['{"host": null, "socket": "\\ud800"}']})
@example({"summary.json": ['{"time_s": "later"}']})
@example({METRICS: ['{"time_s": 1e400, "env_steps": NaN}', ""]})
def test_runs_with_arbitrary_files_are_listed(folder: Path, written: dict[str, list[str]]) -> None:
    place = folder / "run"
    place.mkdir(exist_ok=True)
    (place / "config.yaml").write_text("env:\n  id: CartPole-v1\n")
    for name in RUN_FILES:
        text = "\n".join(written.get(name, []))
        (place / name).write_bytes(text.encode(errors="surrogatepass"))
    with bounded():
        found = runs.find(str(folder))
        runs.show(found)
        objects((place / METRICS).read_bytes())


@pytest.mark.slow
@fuzzed(cost=10)
@given(metrics=st.lists(texts(LINE), max_size=4), evaluations=st.lists(texts(LINE), max_size=2))
@example(metrics=['{"time_s": 1, "env_steps": 1, "episode_return_mean": "x"}'], evaluations=[])
@example(metrics=["{}"], evaluations=["{}"])
def test_a_plot_and_a_page_are_drawn_or_refused(
    folder: Path, metrics: list[str], evaluations: list[str]
) -> None:
    place = folder / "plotted"
    place.mkdir(exist_ok=True)
    for name, lines in ((METRICS, metrics), ("evaluations.jsonl", evaluations)):
        (place / name).write_bytes("".join(f"{t}\n" for t in lines).encode(errors="surrogatepass"))
    with bounded(40.0):
        refused(lambda: plot([str(place)], str(place / "x.png")))
        refused(lambda: describe(compare([str(place)])))
        refused(lambda: report_page(place))


# -------------------------------------------------------------------------------- environment

NUMBERS = st.sampled_from(["0", "1", "-1", "", " 1", "1e3", "99999", str(2**63), "9" * 5000, "x"])
HOSTS = st.sampled_from(
    [
        "127.0.0.1",
        "::1",
        "",
        "a" * 300,
        "a." * 200,
        "\0",
        "é",
        "xn--\udc80",
        "-",
        "%",
        "[::1]",
        "..",
    ]
)
TORCHRUN_NAMES = [
    "RANK", "WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT",
]  # fmt: skip


@fuzzed(cost=0.3)
@given(
    environ=st.dictionaries(st.sampled_from(TORCHRUN_NAMES), NUMBERS),
    host=HOSTS,
    sound=st.booleans(),
)
def test_torchrun_variables_give_a_valid_rank_or_are_refused(
    environ: dict[str, str], host: str, sound: bool
) -> None:
    base = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "29500"} if sound else {}
    said = {"TORCHELASTIC_RUN_ID": "x", "MASTER_ADDR": host, **base, **environ}

    def use() -> None:
        place = find_place(None, None, None, said)
        assert place is not None
        assert 0 <= place.rank < place.world, "a rank that no learner can have"
        assert 0 < place.store.port < 1 << 16

    refused(use)


@fuzzed(cost=0.3)
@given(rank=st.integers(-2, 3), world=st.integers(-1, 3), host=HOSTS, port=NUMBERS)
def test_rank_options_give_a_valid_rank_or_are_refused(
    rank: int, world: int, host: str, port: str
) -> None:
    from penstock.launch.machines import check_place

    config = resolve("cartpole")

    def use() -> None:
        place = find_place(rank, world, f"{host}:{port}", {})
        assert place is not None
        check_place(place, config, {})

    refused(use)
