"""The process of a `Recording`: it plays one episode by a checkpoint of a run, in the better way.

The video is bounded in pictures, bytes and CPU time: a longer episode is cut there. The newest
`KEPT` videos of new bests are not deleted. The result, or the reason for none, is a JSON object on
standard output.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from penstock.configs.errors import UserError
from penstock.core.place import brief_with_place
from penstock.core.processes import die_with, end_programs
from penstock.evaluation.best_videos import FOLDER, LIMIT_S, PART, Checkpoint
from penstock.evaluation.decisions import decisions_path

if TYPE_CHECKING:
    from penstock.evaluation.evaluate import Episode
    from penstock.evaluation.video import FilmedPolicy, Show
    from penstock.evaluation.window import Picture

BEST = re.compile(r"best-at-[0-9]+\.mp4")
KEPT = 5
MOST_PICTURES = 3600  # a minute of Atari
MOST_NBYTES = 16 << 20
MOST_CPU_S = 30.0
"""CPU time of the environment and the policy."""
MOST_HEIGHT = 720
"""Larger pictures are reduced."""


def main(parent: int, run_dir: str, which: Checkpoint, seed: int, part: str) -> NoReturn:
    """Record the episode, print the result as JSON, and exit.

    This process is killed when the one with the pid ``parent`` ends. The other arguments go to
    `record`.
    """
    die_with(parent, signal.SIGKILL)
    os.nice(19)
    # If memory is short, this process is killed and not the run's.
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")

    # Environments may print: that goes to standard error, and the answer alone to standard output.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    # The environment is found as in the run's other processes.
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    from penstock.evaluation.video import NotShownError

    try:
        answer = record(Path(run_dir), which, seed, part)
    except NotShownError as error:
        answer = {"skipped": str(error)}
    except UserError as error:
        answer = {"error": str(error)}
    except Exception as error:
        traceback.print_exc()
        answer = {"error": brief_with_place(error)}

    json.dump(answer, answers)
    answers.close()
    sys.stderr.flush()
    end_programs()
    # Without the end of the interpreter: renderers that are unloaded in the wrong order crash.
    os._exit(0)


def record(run_dir: Path, which: Checkpoint, seed: int, part_name: str) -> dict[str, Any]:
    """Record an episode by a checkpoint of a run, with its decisions.

    Args:
        run_dir: folder of the run.
        which: the checkpoint. The video is `videos/best-at-<trained steps>.mp4` of the best, and
            `videos/now.mp4` of the last.
        seed: seed of the environment, which gives the episode.
        part_name: name of the file that is written until the video is complete.

    Returns: the name of the video in "file", and the CPU seconds that it took in "cpu_s".

    Raises:
        NotShownError: if the environment cannot be shown.
        UserError: if the video cannot be made for another reason.
    """
    from penstock.configs.load import load_run
    from penstock.evaluation.estimates import way_of
    from penstock.evaluation.policy_source import PolicySource, fitting_weights
    from penstock.evaluation.video import encoding, open_filmed_policy
    from penstock.learner.checkpoints import checkpoint_format
    from penstock.learner.checkpoints.checkpoint_history import PLAY

    # The checkpoint is read only once, since the learner may replace it.
    config = load_run(run_dir)
    folder = run_dir / "checkpoints" / which
    stored = checkpoint_format.load(folder)
    steps = int(stored.meta["progress"]["trained_steps"])
    source = PolicySource(
        config,
        name=which,
        sampled=way_of(stored.meta.get(PLAY)) == "sampled",
        weights=lambda env: fitting_weights(config, folder, stored, env),
    )

    path = run_dir / FOLDER / ("now.mp4" if which == "last" else f"best-at-{steps}.mp4")
    part = path.with_name(part_name)
    remove_abandoned(path.parent)
    with open_filmed_policy(source, sample=None, seed=seed, max_steps=None, tracked=True) as filmed:
        played: list[Episode] = []

        def write_decisions(decisions: Path) -> None:
            filmed.write_decisions(decisions, played, trained_steps=steps)

        with encoding(path, filmed.env, write_decisions, part, gently=True) as show:
            played.append(_show_episode(filmed, seed, show, part))
    if which == "best":
        keep_newest(path.parent)

    times = os.times()
    cpu_s = times.user + times.system + times.children_user + times.children_system
    return {"file": path.name, "cpu_s": cpu_s}


def _show_episode(filmed: FilmedPolicy, seed: int, show: Show, part: Path) -> Episode:
    """Show one episode, which is cut where the video ``part`` would become too long.

    Returns: the episode, as far as it was shown.
    """
    from penstock.evaluation.evaluate import Episode

    assert filmed.track is not None
    pictures = 0
    episode_return = 0.0
    for shot in filmed.shots(1, seed):
        show([_reduced(picture) for picture in shot.pictures])
        pictures += len(shot.pictures)
        episode_return += shot.reward
        if shot.episode is not None:
            return shot.episode
        if _is_long(pictures, part):
            break
    return Episode(episode_return, filmed.track.steps, cut=True)


def keep_newest(folder: Path) -> None:
    """Delete all videos of new bests but the newest `KEPT`, with their decisions."""
    with suppress(OSError):  # another program deletes here too
        videos = [path for path in folder.iterdir() if BEST.fullmatch(path.name)]
        videos.sort(key=lambda path: path.lstat().st_mtime_ns)
        for video in videos[:-KEPT]:
            video.unlink()
            decisions_path(video).unlink(missing_ok=True)


def remove_abandoned(folder: Path) -> None:
    """Delete what killed recordings have left: files older than `LIMIT_S`, which none takes."""
    with suppress(OSError):  # if there is no folder yet
        for path in folder.glob(f"{PART}*"):
            if path.lstat().st_mtime < time.time() - LIMIT_S:
                path.unlink()


def _is_long(pictures: int, part: Path) -> bool:
    """Whether a video of so many ``pictures``, of which ``part`` is encoded, has to end."""
    if pictures >= MOST_PICTURES or time.process_time() > MOST_CPU_S:
        return True
    return part.exists() and part.stat().st_size > MOST_NBYTES


def _reduced(picture: Picture) -> Picture:
    """Returns every n-th row and column of a picture, so that it has at most `MOST_HEIGHT`.

    Both numbers are even, as a video needs them.
    """
    step = -(-picture.shape[0] // MOST_HEIGHT)  # rounded up
    reduced = picture[::step, ::step]
    height, width = reduced.shape[:2]
    return reduced[: height // 2 * 2, : width // 2 * 2]


if __name__ == "__main__":
    _, parent, folder, which, seed, part = sys.argv
    main(int(parent), folder, "last" if which == "last" else "best", int(seed), part)
