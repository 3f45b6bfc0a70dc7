"""Errors in files and overrides name the place and the nearest valid option."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.configs.errors import UserError
from penstock.configs.keys import algorithms, nearest, options
from penstock.configs.load import presets, resolve
from penstock.configs.messages import show


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def refusal(target: str, *overrides: str) -> str:
    with pytest.raises(UserError) as refused:
        resolve(target, overrides)
    return str(refused.value)


def refusal_of_file(text: str, *overrides: str) -> str:
    Path("x.yaml").write_text(text)
    return refusal("x.yaml", *overrides)


@pytest.mark.parametrize(
    ("unknown", "meant"),
    [
        ("learner.lrr", "learner.lr"),
        ("lerner.lr", "learner.lr"),
        ("lr", "learner.lr"),
        ("seed", "run.seed"),
        ("algo.lr", "learner.lr"),
        ("learner.codec", "learner.reduce.codec"),
        ("actor.count", "actors.count"),
        ("actor.threads", "actors.threads"),
        ("enviroment.idd", "env.id"),
        ("stop.retrun", "stop.return"),
        ("stop.return_", "stop.return"),
        ("env.kwarg", "env.kwargs"),
    ],
)
def test_an_unknown_option_is_refused_with_the_nearest(unknown: str, meant: str) -> None:
    expected = f"override {unknown}=1: there is no option {unknown}; the nearest option is {meant}"
    assert refusal("pong", f"{unknown}=1") == expected


@pytest.mark.parametrize(
    ("algo", "unknown", "here"),
    [
        ("ppo", "algo.gamma", "algo.discount"),
        ("ppo", "gamma", "algo.discount"),
        ("ppo", "learner.learning_rate", "learner.lr"),
        ("ppo", "clip_range", "algo.clip"),
        ("impala", "clip_range", "algo.clip, of algo.name ppo"),
        ("ppo", "algo.ent_coef", "algo.entropy_cost"),
        ("sac", "algo.ent_coef", "algo.alpha"),
        ("ppo", "algo.vf_coef", "algo.value_cost"),
        ("ppo", "max-grad-norm", "learner.grad_clip"),
        ("ppo", "algo.n_steps", "actors.unroll"),
        ("dqn", "algo.n_steps", "algo.n_step"),
        ("ppo", "n_envs", "actors.count * actors.envs"),
        ("ppo", "actors.num_workers", "actors.count"),
        ("ppo", "run.total_timesteps", "stop.env_steps"),
        ("dqn", "batch_size", "replay.batch_size"),
        (
            "impala",
            "learner.batch_size",
            "actors.envs * actors.unroll * learner.batch_slots / learner.updates_per_batch",
        ),
    ],
)
def test_option_of_another_library_is_refused_with_its_equivalent(
    algo: str, unknown: str, here: str
) -> None:
    expected = f"override {unknown}=1: there is no option {unknown}; the equivalent is {here}"
    assert refusal("CartPole-v1", f"algo.name={algo}", f"{unknown}=1") == expected


def test_misspelled_option_of_another_library_names_the_equivalent() -> None:
    assert nearest("learner.learning_rat", "ppo") == "the equivalent of learning_rate is learner.lr"
    expected = "the equivalent of total_timesteps is stop.env_steps"
    assert nearest("total_timestep", "ppo") == expected


def test_option_without_its_section_names_the_full_option() -> None:
    assert nearest("gae_lambda", "ppo") == "the nearest option is algo.gae_lambda"
    expected = "the nearest option is algo.gae_lambda, of algo.name ppo"
    assert nearest("gae_lambda", "impala") == expected


@pytest.mark.parametrize("algo", algorithms())
def test_every_option_misspelled_by_one_letter_is_suggested(algo: str) -> None:
    for name in options(algo):
        section, _, key = name.partition(".")
        if len(key) > 3:
            slip = nearest(f"{section}.{key[:2]}{key[3:]}", algo)
            assert slip == f"the nearest option is {name}"
            assert nearest(f"{section[:-1]}.{key}", algo).endswith(f".{key}")


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["algo.name=dqn", "algo.doubel=1"], "algo.doubel; the nearest option is algo.double"),
        (["algo.name=sac", "algo.taw=1"], "algo.taw; the nearest option is algo.tau"),
        (
            ["algo.name=impala", "algo.tau=1"],
            "algo.tau; it is an option of algo.name sac or td3, impala has name, discount, "
            "reward_clip, reward_scale, normalize_rewards, teacher, teacher_cost, trace_lambda, "
            "rho_clip, c_clip, entropy_cost, value_cost, normalize_advantages",
        ),
    ],
)
def test_an_unknown_option_is_looked_up_in_the_algorithm_that_is_chosen(
    overrides: list[str], sentence: str
) -> None:
    assert refusal("pong", *overrides) == f"override {overrides[-1]}: there is no option {sentence}"


def test_a_wrong_value_of_another_algorithm_is_named_with_its_rule() -> None:
    assert refusal("Acrobot-v1", "algo.n_step=0", "algo.name=dqn") == (
        "override algo.n_step=0: algo.n_step is 0; it must be a whole number from 1 to 1024; "
        "the default is 3"
    )


@pytest.mark.parametrize(
    ("override", "rule"),
    [
        ("actors.count=1e9", "a whole number from 1 to 16384, 'MIN..MAX', such as '8..40'"),
        ("actors.count=8..40000", "a whole number from 1 to 16384, 'MIN..MAX', such as '8..40'"),
        ("actors.envs=1e9", "a whole number from 1 to 1048576 or 'auto'"),
        ("actors.unroll=1e9", "a whole number from 1 to 1048576;"),
        ("actors.threads=1e9", "a whole number from 1 to 1024;"),
        ("actors.env_threads=1e9", "a whole number from 1 to 1024;"),
        ("learner.count=1e9", "a whole number from 1 to 16384 or 'MIN..MAX'"),
        ("learner.threads=1e9", "a whole number from 1 to 1024 or 'auto'"),
        ("learner.gather_threads=1e9", "a whole number from 1 to 1024 or null"),
        ("learner.prefetch=1e9", "a whole number from 0 to 1024 or null"),
        ("learner.updates_per_batch=1e9", "a whole number from 1 to 1048576;"),
        ("learner.server_shards=1e9", "a whole number from 1 to 16384;"),
        ("transport.slots=1e9", "a whole number from 1 to 1024;"),
        ("transport.connectors=17", "a whole number from 1 to 16 or 'auto'"),
        ("replay.batch_size=1e9", "a whole number from 1 to 1048576;"),
        ("algo.epochs=1e9", "a whole number from 1 to 1024;"),
        ("model.core_size=1e9", "a whole number from 1 to 1048576;"),
        ("model.hidden=[1e12]", "a list of whole numbers from 1 to 1048576, such as [64, 64];"),
        (
            "stop.env_steps=1e30",
            "a whole number of at least 1 or null, of at most 9223372036854775807;",
        ),
        ("learner.staleness=1e20", "a whole number of at least 0, of at most 9223372036854775807;"),
    ],
)
def test_numbers_beyond_any_machine_are_refused(override: str, rule: str) -> None:
    """A digit too many would exhaust the machine or end a process with a library's message."""
    assert f"; it must be {rule}" in refusal("boxing", override)


@pytest.mark.parametrize(
    ("override", "rule"),
    [
        ("league.name=../x", "a name of up to 64 letters, digits, '_', '.' and '-'"),
        (f"league.name={'x' * 65}", "a name of up to 64 letters"),
        ("league.lines={a/b: {}}", "a map of names of up to 64 letters"),
    ],
)
def test_a_line_is_named_as_files_can_be(override: str, rule: str) -> None:
    assert f"; it must be {rule}" in refusal("kuhn", override)


def test_option_unlike_any_other_is_refused_with_the_choices() -> None:
    assert refusal("pong", "weights.zzz=1") == (
        "override weights.zzz=1: there is no option weights.zzz; weights has dtype"
    )
    assert refusal("pong", "qqq.zzz=1") == (
        "override qqq.zzz=1: there is no option qqq.zzz; the sections are env, algo, model, "
        "actors, transport, replay, learner, weights, checkpoint, eval, league, run, stop"
    )


def test_a_wrong_value_in_a_file_is_named_with_its_line() -> None:
    text = "# a run\nbase: pong\n\nlearner:\n  # too\n  lr: fast\n"
    assert refusal_of_file(text) == (
        "x.yaml:6: learner.lr is 'fast'; it must be a number above 0 or a schedule {from: A, "
        "to: B, steps: N}; the default is 0.0003"
    )


def test_a_schedule_is_shown_as_a_user_writes_it() -> None:
    assert refusal("CartPole-v1", "algo.name=pqn", "algo.epsilon=2").endswith(
        'the default is {"from": 1.0, "to": 0.05, "steps": 300000}'
    )


def test_an_unknown_section_and_key_in_a_file_are_named_with_their_lines() -> None:
    text = "env:\n  id: X-v0\n  sticky: 1\nlerner:\n  lr: 1\n  eps: 1\nactor: {count: 3}\n"
    assert refusal_of_file(text).splitlines() == [
        "x.yaml:3: there is no option env.sticky; env has id, kind, kwargs, wrappers, record, "
        "embed_above, on_error",
        "x.yaml:4: there is no option lerner; the nearest section is learner",
        "x.yaml:7: there is no option actor.count; the nearest option is actors.count",
    ]


def test_all_mistakes_are_shown_each_at_its_own_place() -> None:
    text = "base: cartpole\nactors:\n  count: 0\nmodel:\n  hidden:\n  - 64\n  - wide\n"
    assert refusal_of_file(text, "learner.lr=fast", "learner.lrr=1").splitlines() == [
        'x.yaml:5: model.hidden is [64, "wide"]; it must be a list of whole numbers from 1 '
        "to 1048576, such as [64, 64]; the default is [64, 64]",
        "x.yaml:3: actors.count is 0; it must be a whole number from 1 to 16384, "
        "'MIN..MAX', such as '8..40' or 'auto'; the default is 'auto'",
        "override learner.lr=fast: learner.lr is 'fast'; it must be a number above 0 "
        "or a schedule {from: A, to: B, steps: N}; "
        "the default is 0.0003",
        "override learner.lrr=1: there is no option learner.lrr; the nearest option is learner.lr",
    ]


def test_last_override_of_an_option_counts_and_is_named() -> None:
    assert refusal("pong", "learner.lr=1", "learner.lr=fast").startswith("override learner.lr=fast")
    assert resolve("pong", ["learner.lr=fast", "learner.lr=1"]).learner.lr == 1.0


def test_a_value_for_a_whole_section_is_refused() -> None:
    assert refusal("pong", "learner=3") == (
        "override learner=3: learner is 3; it must be a map of options, such as learner.count"
    )
    assert refusal("pong", "algo=dqn") == (
        "override algo=dqn: algo is 'dqn'; it must be a map of options, such as algo.name"
    )


def test_config_without_an_environment_is_refused() -> None:
    sentence = "x.yaml: env.id is missing; name the environment, for example env.id=CartPole-v1"
    assert refusal_of_file("") == sentence
    assert refusal_of_file("env:\n") == sentence
    assert refusal_of_file("learner:\n  lr: 1\n") == sentence


@pytest.mark.parametrize("override", ["x", "=3", "learner.=3", "a..b=3", "--lr", ""])
def test_malformed_override_is_refused(override: str) -> None:
    assert refusal("pong", override) == (
        f"override {override}: this is not key=value; write an option and its value, for example "
        "learner.lr=3e-4"
    )


def test_an_override_of_too_many_parts_is_refused_and_cut() -> None:
    text = refusal("pong", f"env.kwargs{'.a' * 5000}=1")
    assert "...: its name has 5002 parts, and at most 100 are allowed; write an option" in text
    assert len(text) < 500


def test_only_the_first_of_many_mistakes_are_shown() -> None:
    lines = refusal_of_file("env: {id: a-v0}\n" + "".join(f"x{i}: 1\n" for i in range(3000)))
    assert lines.splitlines()[19].startswith("x.yaml:21: there is no option x19; ")
    assert lines.splitlines()[20:] == ["and 2980 more errors; correct these first"]


def test_an_override_that_is_not_yaml_is_refused() -> None:
    assert refusal("pong", "model.hidden=[64", "x").splitlines() == [
        "override model.hidden=[64: this is not YAML: expected ',' or ']', but got '<stream end>'; "
        "correct it, or put text in quotes",
        "override x: this is not key=value; write an option and its value, for example "
        "learner.lr=3e-4",
    ]


@pytest.mark.parametrize(
    ("text", "beginning"),
    [
        ("env:\n\tid: x", "x.yaml:2: this is not YAML: found character '\\t'"),
        ("env: [1\n", "x.yaml:2: this is not YAML: expected ',' or ']'"),
        ("env: {id: a}\n---\nenv: {}", "x.yaml:2: this is not YAML: but found another document"),
        ("env:\n  id: !!int abc", "x.yaml: this is not YAML: invalid literal"),
        ("env:\n  id: !!int ''", "x.yaml: this is not YAML: '' is no int; correct it"),
        ("run:\n  log: !!bool x", "x.yaml: this is not YAML: 'x' is no bool; correct it"),
        ("a: 0x" + "f" * 4000, "x.yaml: this is not YAML: Exceeds the limit (4300 digits)"),
        ("a: " + "9" * 400 + "e99", "x.yaml: this is not YAML: cannot convert float infinity"),
        (
            "%YAML 1.1\n---\na: 1" + ":59" * 300_000,
            "x.yaml: this is not YAML: a number of 900,001 characters; at most 4,300 are read",
        ),
        ("a: \x01", "x.yaml: this is not YAML: unacceptable character"),
        (f"a: &k {{? {'k' * 99_000}}}\nb: [{'*k, ' * 50}]", "x.yaml: this is not YAML: more than"),
        (f"a: &k {'v' * 99_000}\nb: [{'*k, ' * 50}]", "x.yaml: this is not YAML: more than"),
        ("#" * (1 << 20) + "\na: 1", "x.yaml has more than the 1,048,576 characters of YAML"),
        ("env: &a {b: *a}", "x.yaml: this is not YAML: values are nested too deeply, or an anchor"),
        ("env:\n  ? [1]\n  : 2", "x.yaml:2: a key must be plain text; write `name: value`"),
        ("env:\n  id: a\n  id: b", "x.yaml:3: env.id is already set in line 2; keep one of them"),
        ("- 1", "x.yaml is [1]; it must contain sections such as `env:`"),
        ("a\n", "x.yaml is 'a'; it must contain sections such as `env:`"),
        ("\nbase: png", "x.yaml:2: base is 'png'; it must be a preset: bit_flip, boxing, "),
        ("base: [1]", "x.yaml:1: base is [1]; it must be a preset: bit_flip, boxing, "),
    ],
)
def test_a_file_that_is_no_config_is_refused(text: str, beginning: str) -> None:
    assert refusal_of_file(text).startswith(beginning)


def test_a_file_that_cannot_be_read_is_refused() -> None:
    Path("folder.yaml").mkdir()
    Path("bytes.yaml").write_bytes(b"\xff\xfe\xff")
    assert refusal("none.yaml") == (
        "none.yaml cannot be read: No such file or directory; name a YAML file"
    )
    assert refusal("folder.yaml") == "folder.yaml cannot be read: Is a directory; name a YAML file"
    assert refusal("bytes.yaml") == (
        "bytes.yaml cannot be read: it is not UTF-8 text; name a YAML file"
    )


def test_a_path_that_does_not_exist_is_not_taken_for_a_preset() -> None:
    assert refusal("runs/nope") == (
        "there is no 'runs/nope'; give a preset, a YAML file, a gymnasium id such as CartPole-v1, "
        "or module:function, or the folder of a run to resume"
    )


@pytest.mark.parametrize(
    ("target", "meant"),
    [
        ("pnog", "pong"),
        ("Pong", "pong"),
        ("cart-pole", "cartpole"),
        ("CartPole", "cartpole"),
        ("pong-apex", "pong_apex"),
    ],
)
def test_an_unknown_target_is_refused_with_the_nearest_preset(target: str, meant: str) -> None:
    assert refusal(target) == (
        f"'{target}' is not a target; the nearest preset is {meant}, and a target is a preset "
        f"({', '.join(presets())}), a YAML file, a gymnasium id such as CartPole-v1, or "
        "module:function"
    )


def test_target_too_long_for_a_file_name_is_refused_as_unknown() -> None:
    assert refusal("x" * 300).startswith(f"'{'x' * 79}... is not a target; the nearest preset")
    assert refusal("a\0.yaml").endswith(" cannot be read: embedded null byte; name a YAML file")


def test_long_value_is_cut_in_the_message() -> None:
    assert show("x" * 1000) == "'" + "x" * 79 + "..."
    assert show(None) == "null"
    assert show({"a": [1, True]}) == '{"a": [1, true]}'
