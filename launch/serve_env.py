"""`penstock serve-env`: a run whose episodes are played by games that drive their own loop.

It is a run like any other, with a connector of games for each learner in place of actors.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from penstock.configs.errors import UserError
from penstock.configs.games import DEFAULTS, GAMES_ID, PRESET_DEFAULTS, seat_options
from penstock.configs.load import CONFIG_FILE, Resolved, resolve_target
from penstock.configs.schema import Config
from penstock.core import run_dir
from penstock.core.role_spec import RoleSpec
from penstock.core.run_dir import Resume
from penstock.core.web.listen import Listen, listen_at
from penstock.launch import topology
from penstock.launch.resumed import resolve_resumed
from penstock.launch.run import LOCAL_ENGINE, EngineChoice, print_result, run_dir_of
from penstock.serving.server import check_packages, connection_note
from penstock.transport.addresses import address_of_rank

RUN_DIR = "run.dir="
COMMAND = "penstock serve-env"


def serve_env(
    target: str | None,
    overrides: Sequence[str],
    bind: str,
    conditions: Mapping[str, Any],
    resume: Resume,
    as_json: bool,
    *,
    source: str | None,
    place: EngineChoice,
    show: Callable[[str], object],
) -> int:
    """Run learners that train on what games play, until the run ends; returns the exit code.

    Args:
        target: as of `resolve_resumed`; None: the first game that connects says its spaces.
        overrides: ``key=value``.
        bind: where the games of the first learner connect.
        conditions: which games are served, as keywords of `Listen`.
        resume: "no", "auto" or "must".
        as_json: whether the summary is printed as JSON, and the view on standard error.
        source: the value of ``--resume-from``.
        place: the engine that starts the processes.
        show: shows a sentence before the run has a view.

    Raises UserError.
    """
    check_packages(COMMAND)
    listen = listen_at(bind, conditions)
    listen.check()
    is_local = place.name == LOCAL_ENGINE.name
    if is_local:
        listen.check_tls()
        if listen.port == 0:
            # A service that is restarted listens at the same port.
            bind = _with_free_port(bind, listen)
            listen = listen_at(bind, conditions)

    if target is None and resume != "no":
        target = _run_folder(overrides)
    if target is None:
        if not is_local:
            raise UserError(
                f"without a TARGET the run takes its spaces from the first game on this host, and "
                f"with --engine {place.name} games connect to the host of the learner; give a "
                "TARGET that has their spaces"
            )
        _check_before_wait(overrides, bind, source)
        options = _options_of_first_game(listen, overrides, show)
        if options is None:
            return 130
        target = GAMES_ID
        overrides = [*options, *overrides]
    elif is_local:
        _check_port(listen)

    resolved = resolve_games_run(target, overrides, resume, source)
    return print_result(
        resolved,
        run_dir_of(resolved),
        resume,
        as_json,
        make_specs=partial(_make_specs, bind, conditions),
        source=source,
        place=place,
    )


def _make_specs(
    bind: str, conditions: Mapping[str, Any], config: Config, runtime_dir: Path
) -> Sequence[RoleSpec]:
    """Returns the roles of the run."""
    return topology.serve_env_roles(config, bind, conditions, runtime_dir)


def resolve_games_run(
    target: str, overrides: Sequence[str], resume: Resume, source: str | None
) -> Resolved:
    """Returns the config of a run that games play. Raises UserError.

    What a target has for actors is translated: slots of one seat take the place of slots of
    several environments, frames are not stacked by the learner, and a preset's bound on the policy
    lag, which was chosen for actors, does not hold.
    """
    of_actors = resolve_resumed(target, overrides, resume, source)
    replaced = [
        text for text in PRESET_DEFAULTS if text.partition("=")[0] not in of_actors.own_options
    ]
    options = [*DEFAULTS, *replaced, *overrides, *seat_options(of_actors.config)]
    return resolve_resumed(target, options, resume, source)


def _run_folder(overrides: Sequence[str]) -> str:
    """Returns the folder of the run to resume, as `run.dir` names it. Raises UserError."""
    folders = [text.removeprefix(RUN_DIR) for text in overrides if text.startswith(RUN_DIR)]
    if folders and (Path(folders[-1]) / CONFIG_FILE).is_file():
        return folders[-1]
    raise UserError(
        f"--resume needs the folder of the run, which has the spaces of its games: {COMMAND} RUN "
        "--resume auto"
    )


def _check_port(listen: Listen) -> None:
    """Raise UserError if the port is taken, before processes start."""
    listen.bind().close()


def _with_free_port(bind: str, listen: Listen) -> str:
    """Returns the address with a port that is free now. Raises UserError if there is none."""
    with listen.bind() as listener:
        port: int = listener.getsockname()[1]
    return f"{bind.rpartition(':')[0]}:{port}"


def _check_before_wait(overrides: Sequence[str], bind: str, source: str | None) -> None:
    """Raise UserError for what would end the run right after its first game has connected.

    The arguments are as of `serve_env`. A folder that `run.dir` names is made.
    """
    config = resolve_games_run(GAMES_ID, overrides, "no", source).config
    address_of_rank(bind, config.learner.most_count - 1)
    if config.run.dir is not None:
        with run_dir.run_folder(Path(config.run.dir), "no" if source is None else "auto"):
            pass


def _options_of_first_game(
    listen: Listen, overrides: Sequence[str], show: Callable[[str], object]
) -> list[str] | None:
    """Wait for the first game, and return the options that its spaces give.

    Returns None if the wait was interrupted. Raises UserError.
    """
    from penstock.envs.self_driven import games_info, kwargs_of
    from penstock.models.fitting import kind_of
    from penstock.serving.first_game import wait_for_spaces

    def show_address(port: int) -> None:
        show(f"the run takes its spaces from the first game; {connection_note(listen, port)}")

    spaces = wait_for_spaces(listen, show_address)
    if spaces is None:
        return None

    options = [f"env.kwargs={json.dumps(kwargs_of(*spaces))}"]
    config = resolve_target(GAMES_ID, [*options, *overrides]).config
    return [*options, f"env.kind={kind_of(config, games_info(config.env))}"]
