"""Where the weights of a policy are: in a checkpoint of a run, or in an exported file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gymnasium.spaces import Space

from penstock.algos.acting import make_policy
from penstock.algos.samples import network_shape
from penstock.configs.code_references import references
from penstock.configs.errors import UserError
from penstock.configs.load import load_run
from penstock.configs.schema import Config
from penstock.core import used_names
from penstock.core.params import Float32
from penstock.envs import BatchedEnv, EnvInfo
from penstock.envs.space_difference import difference
from penstock.evaluation.estimates import way_of
from penstock.learner.checkpoints import checkpoint_format, exported
from penstock.learner.checkpoints.checkpoint_format import Checkpoint
from penstock.learner.checkpoints.checkpoint_history import PLAY, checkpoint_folder
from penstock.learner.checkpoints.checkpoint_spaces import check_spaces
from penstock.models.acting.policy import Policy


class PolicySource(NamedTuple):
    """Where the weights of a policy are: in a checkpoint of a run, or in an exported file."""

    config: Config
    name: str
    """Name of the checkpoint; "file" for an exported file."""
    sampled: bool
    """Whether it is played with sampled actions by default."""
    weights: Callable[[BatchedEnv], Float32]
    """Returns the flat vector of weights for environments, which from then on pack observations as
    in training. Raises UserError if these have other spaces than in training, or another network.
    """

    def read_once(self) -> PolicySource:
        """Returns a source with the weights of its first use, also if the run saves others."""
        stored: Float32 | None = None
        packed_space: Space[Any] | None = None

        def weights(envs: BatchedEnv) -> Float32:
            nonlocal stored, packed_space
            if stored is None or packed_space is None:
                stored = self.weights(envs)
                packed_space = envs.info.spaces[0]
            # Another policy may have packed them otherwise meanwhile.
            envs.pack_as(packed_space)
            return stored

        return self._replace(weights=weights)

    def policy(self, envs: BatchedEnv, seed: int, rows: int | None = None) -> Policy:
        """Returns the policy with its weights, over ``rows`` of the environments ``envs``.

        None takes all rows. ``seed`` gives the random numbers of its actions. Raises UserError as
        `weights` does.
        """
        # Weights first: a config from elsewhere may ask for a network of any size.
        weights = self.weights(envs)
        actors = self.config.actors.model_copy(update={"envs": rows or envs.count})
        policy = make_policy(self.config.model_copy(update={"actors": actors}), envs.info, seed)
        policy.load(weights)
        return policy


def find_policy(source: str | Path, which: str, allow: Sequence[str] = ()) -> PolicySource:
    """Returns the checkpoint ``which`` of a run, or the policy of an exported file.

    Args:
        source: folder of the run, or path of the file.
        which: "best" or "last"; of no effect for a file.
        allow: patterns of names that may be imported. A file may name no code without them; a
            run's folder may name what runs of this user have used.

    Raises:
        UserError: if there is no policy, or if it names code that must not be imported.
    """
    if Path(source).is_file():
        return _file_source(Path(source), allow)

    config = load_run(source)
    folder = checkpoint_folder(source, which)
    used_names.check(references(config), allow, str(source))
    sampled = way_of(checkpoint_format.read_meta(folder).get(PLAY)) == "sampled"
    return of_checkpoint(config, folder, sampled)


def of_checkpoint(config: Config, folder: Path, sampled: bool = False) -> PolicySource:
    """Returns the checkpoint in ``folder``, of a run with ``config``, as the source of a policy."""

    def weights(envs: BatchedEnv) -> Float32:
        return fitting_weights(config, folder, checkpoint_format.load(folder), envs)

    return PolicySource(config, folder.name, sampled, weights)


def fitting_weights(config: Config, folder: Path, stored: Checkpoint, envs: BatchedEnv) -> Float32:
    """Returns the weights of a checkpoint, after a check that they fit ``envs``.

    It does what `PolicySource.weights` says. ``folder`` is the place of the checkpoint, for
    messages.
    """
    envs.pack_as(trained_info(config, folder, stored, envs.info).spaces[0])
    return stored.weights


def trained_info(config: Config, folder: Path, stored: Checkpoint, info: EnvInfo) -> EnvInfo:
    """Returns the properties ``info`` of an environment as they were in training.

    Observations are then packed as in training. ``folder`` is the place of the checkpoint, for
    messages. Raises UserError if the checkpoint has other spaces, or another network.
    """
    packed_space = check_spaces(folder, stored, info, config.env.id)
    info = info.packed_as(config.env.id, packed_space)
    layout = network_shape(config, info).layout
    checkpoint_format.check_layout(folder / checkpoint_format.FILE, stored.layout, layout)
    return info


def _file_source(path: Path, allow: Sequence[str]) -> PolicySource:
    """Returns an exported file as the source of a policy, with the arguments of `find_policy`."""
    stored = exported.read(path, allow, plays=True)

    def weights(envs: BatchedEnv) -> Float32:
        if differs := difference(stored.spaces, envs.info.spaces):
            raise UserError(
                f"{path} is a policy for {stored.config.env.id} with other observations or actions "
                f"than that environment has here: {differs.column} {differs.trained} in training, "
                f"{differs.present} here; install the version that it was trained with"
            )
        envs.pack_as(stored.spaces[0])
        return stored.weights

    return PolicySource(stored.config, "file", way_of(stored.play) == "sampled", weights)
