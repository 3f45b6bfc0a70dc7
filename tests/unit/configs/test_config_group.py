"""Contradictory options of learner groups are refused with advice that works."""

from __future__ import annotations

import pytest

from penstock.configs.errors import UserError
from penstock.configs.load import resolve

FOUR = ["learner.count=4", "actors.count=4"]

CASES = {
    "signs into adam": (
        [*FOUR, "learner.reduce.codec=onebit"],
        "learner.reduce.codec onebit sends signs with one size, which ruins the second moment that",
        ["learner.optimizer=sgd"],
    ),
    "ternary into rmsprop": (
        [*FOUR, "learner.reduce.codec=terngrad", "learner.optimizer=rmsprop"],
        "learner.reduce.codec terngrad sends -1, 0 or 1 times one size, which ruins",
        ["learner.reduce.codec=int8"],
    ),
    "sparse into lamb": (
        [*FOUR, "learner.reduce.codec=dropping", "learner.optimizer=lamb"],
        "learner.reduce.codec dropping sends zeros for most values, which ruins",
        ["learner.optimizer=sgd"],
    ),
    "signs into adam, and adam's own codec": (
        [*FOUR, "learner.reduce.codec=onebit"],
        "learner.reduce.codec onebit sends signs with one size, which ruins the second moment that",
        ["learner.reduce.codec=onebit_adam"],
    ),
    "adam's momentum without adam": (
        [*FOUR, "learner.reduce.codec=zeroone_adam", "learner.optimizer=sgd"],
        "learner.reduce.codec zeroone_adam sends the momentum of Adam, divided by the root of its "
        "variance, and learner.optimizer is sgd; set learner.optimizer=adam, or",
        ["learner.optimizer=adam"],
    ),
    "a server that is nowhere, on hosts of its own": (
        [*FOUR, "learner.server_spread=true"],
        "learner.server_spread true places a parameter server, and learner.pace bsp has none; set",
        ["learner.server_spread=false"],
    ),
    "parameters ahead of a barrier": (
        [*FOUR, "learner.pace=ssp", "learner.staleness=0", "learner.pull=ahead"],
        "learner.pull ahead uses parameters without the learner's last gradient, and "
        "learner.staleness 0 allows none to be missing; set learner.pull=newest or",
        ["learner.staleness=1"],
    ),
    "a cache that never gets old": (
        [*FOUR, "learner.pace=tap", "learner.pull=cached"],
        "learner.pull cached is for learner.pace ssp, and learner.pace is tap; set "
        "learner.pull=newest or learner.pace=ssp",
        ["learner.pull=ahead"],
    ),
    "pulls without a server": (
        [*FOUR, "learner.pull=ahead"],
        "learner.pull ahead is for learner.pace ssp or tap, and learner.pace is bsp; set",
        ["learner.pull=newest"],
    ),
    "signs into lamb, and lamb's own codec": (
        [*FOUR, "learner.reduce.codec=dropping", "learner.optimizer=lamb"],
        "learner.optimizer=sgd (with a learning rate of its own), or learner.reduce.codec="
        "onebit_lamb or int8",
        ["learner.reduce.codec=onebit_lamb"],
    ),
    "lamb's momentum without lamb": (
        [*FOUR, "learner.reduce.codec=onebit_lamb"],
        "learner.reduce.codec onebit_lamb sends the momentum of LAMB, divided by the root of its "
        "variance, and learner.optimizer is adam; set learner.optimizer=lamb, or "
        "learner.reduce.codec=onebit_adam",
        ["learner.optimizer=lamb"],
    ),
    "a variance that nothing measures": (
        [*FOUR, "learner.reduce.codec=onebit_adam", "learner.reduce.warmup_updates=0"],
        "learner.reduce.codec onebit_adam divides by the variance of the gradients of its warm-up, "
        "and learner.reduce.warmup_updates is 0; set it to 1 or more",
        ["learner.reduce.warmup_updates=1"],
    ),
    "two momenta": (
        [*FOUR, "learner.reduce.codec=dgc", "learner.optimizer=lars"],
        "learner.reduce.codec dgc has its own momentum in place of the optimizer's",
        ["learner.optimizer=sgd"],
    ),
    "codec without reduction": (
        [*FOUR, "learner.reduce.codec=int8", "learner.pace=local_sgd"],
        "learner.reduce.codec int8 codes gradients with learner.pace bsp only, and learner.pace is",
        ["learner.reduce.codec=none"],
    ),
    "layers on a server": (
        [*FOUR, "learner.pace=ssp", "learner.optimizer=lamb"],
        "learner.pace ssp uses a parameter server, which stores parameters without layers, and",
        ["learner.optimizer=sgd"],
    ),
    "pace of one": (
        ["learner.pace=tap"],
        "learner.pace tap is for several learners, and learner.count is 1; set learner.count=2",
        ["learner.count=2"],
    ),
    "pace of an algorithm": (
        [*FOUR, "learner.pace=ssp", "algo.name=dqn"],
        "learner.pace ssp is for algorithms without replay, and algo.name is dqn; set",
        ["learner.pace=bsp"],
    ),
    "nobody to wait for": (
        [*FOUR, "learner.pace=backup", "learner.spare=4"],
        "learner.spare 4 is not below learner.count 4, so no gradient would be used; set",
        ["learner.spare=3"],
    ),
    "shards of a server that drops": (
        [*FOUR, "learner.pace=backup", "learner.server_shards=2"],
        "learner.server_shards 2 would each take the first gradients of a step that they receive, "
        "and with learner.pace backup drop others; set",
        ["learner.server_shards=1"],
    ),
    "shards of no server": (
        [*FOUR, "learner.server_shards=2"],
        "learner.server_shards 2 divides a parameter server, and learner.pace bsp has none; set",
        ["learner.server_shards=1"],
    ),
    "one process": (
        [*FOUR, "transport.kind=inproc"],
        "learner.count 4 needs a process for each learner, and transport.kind inproc is one",
        ["transport.kind=shm"],
    ),
    "no samples": (
        ["learner.count=4", "actors.count=3"],
        "learner.count 4 needs actors.count 4 or more, one for each learner, and it "
        "is 3; set actors.count=4",
        ["actors.count=4"],
    ),
    "no samples for the last one": (
        ["learner.count=1..4", "actors.count=3"],
        "learner.count 1..4 needs actors.count 4 or more, one for each learner, and it "
        "is 3; set actors.count=4",
        ["actors.count=4"],
    ),
    "a server of a number that changes": (
        ["learner.count=2..4", "actors.count=4", "learner.pace=ssp"],
        "learner.count 2..4 changes the number of learners, and a parameter server of learner.pace "
        "ssp has a fixed one; set learner.pace=bsp, or learner.count=4",
        ["learner.count=4"],
    ),
    "share of the actors": (
        [*FOUR, "learner.batch_slots=3"],
        "actors.count 4 and transport.slots 2 provide for each learner; set learner.batch_slots=2",
        ["learner.batch_slots=2"],
    ),
    "parts and sums": (
        ["learner.accumulate=2", "learner.updates_per_batch=2"],
        "learner.accumulate 2 makes one update from several batches",
        ["learner.accumulate=1"],
    ),
    "parts, sums and epochs": (
        ["learner.accumulate=2", "algo.name=ppo", "learner.updates_per_batch=1"],
        "update from several batches, and algo.epochs 4 several updates from one",
        ["algo.epochs=1"],
    ),
    "larger batches from replay": (
        ["learner.accumulate=2", "algo.name=dqn"],
        "learner.accumulate 2 is for algorithms without replay, and algo.name is dqn; set",
        ["learner.accumulate=1"],
    ),
    "decay without use": (
        ["learner.weight_decay=0.1"],
        "learner.weight_decay 0.1 is for adamw, sgd, lars and lamb, and learner.optimizer is adam",
        ["learner.optimizer=sgd"],
    ),
    "scaled steps that are not joined": (
        [*FOUR, "learner.pace=tap", "learner.lr_scaling=sqrt"],
        "learner.lr_scaling sqrt is for steps that all learners take together, and with",
        ["learner.lr_scaling=none"],
    ),
    "gradients of several versions": (
        [*FOUR, "learner.pace=ssp", "learner.accumulate=2"],
        "learner.accumulate 2 adds up gradients of the same parameters, and learner.pace ssp "
        "trains each batch on the newest ones of its server; set learner.accumulate=1 or "
        "learner.pace=bsp",
        ["learner.accumulate=1"],
    ),
    "observations normalised by each alone": (
        [*FOUR, "learner.pace=ssp", "model.normalize_observations=true"],
        "model.normalize_observations true needs statistics over the samples of all learners, "
        "which learner.pace ssp does not share; set learner.pace=bsp or "
        "model.normalize_observations=false",
        ["learner.pace=bsp"],
    ),
    "rewards normalised by each alone": (
        [*FOUR, "learner.pace=local_sgd", "algo.name=ppo", "algo.normalize_rewards=true"],
        "algo.normalize_rewards true needs statistics over the samples of all learners, which "
        "learner.pace local_sgd does not share; set learner.pace=bsp or "
        "algo.normalize_rewards=false",
        ["algo.normalize_rewards=false"],
    ),
    "scaled by one": (
        ["learner.lr_scaling=linear"],
        "learner.lr_scaling linear has no effect while learner.count is 1",
        ["learner.lr_scaling=none"],
    ),
}


@pytest.mark.parametrize(("overrides", "text", "advice"), CASES.values(), ids=CASES.keys())
def test_contradictory_group_options_are_refused_and_the_advice_works(
    overrides: list[str], text: str, advice: list[str]
) -> None:
    with pytest.raises(UserError) as refused:
        resolve("Acrobot-v1", overrides)
    assert text in str(refused.value)
    assert len(str(refused.value).splitlines()) == 1
    if advice == ["learner.count=2"]:
        advice = [*advice, "actors.count=2"]
    resolve("Acrobot-v1", [*overrides, *advice])


def test_learners_that_step_together_normalise_together() -> None:
    both = ["model.normalize_observations=true", "algo.normalize_rewards=true"]
    resolve("Acrobot-v1", [*FOUR, *both])


@pytest.mark.parametrize("codec", ["none", "fp16", "bf16", "int8", "powersgd", "auto"])
@pytest.mark.parametrize("optimizer", ["adam", "adamw", "rmsprop", "sgd", "lars", "lamb"])
def test_codecs_of_plain_gradients_suit_every_optimizer(codec: str, optimizer: str) -> None:
    choice = [f"learner.reduce.codec={codec}", f"learner.optimizer={optimizer}"]
    resolve("Acrobot-v1", [*FOUR, *choice])


@pytest.mark.parametrize("codec", ["onebit_adam", "zeroone_adam"])
def test_codecs_of_adams_momentum_accept_adamw(codec: str) -> None:
    choice = [f"learner.reduce.codec={codec}", "learner.optimizer=adamw"]
    resolve("Acrobot-v1", [*FOUR, *choice, "learner.weight_decay=0.1"])


def test_weight_decay_is_refused_with_a_parameter_server() -> None:
    with pytest.raises(UserError, match=r"learner\.optimizer adamw works by layers"):
        resolve("Acrobot-v1", [*FOUR, "learner.pace=ssp", "learner.optimizer=adamw"])
