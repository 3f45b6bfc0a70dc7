"""Names of options in CleanRL, Stable-Baselines3 and Sample Factory that differ from Penstock's.

`docs/coming-from.md` contains the same tables, with further differences; a test compares them.
"""

from __future__ import annotations

from penstock.configs.algorithms import ALGORITHMS, OffPolicyConfig

# The product of options that makes up a batch.
_BATCH = "actors.envs * actors.unroll * learner.batch_slots"

# By option of Penstock, or product of options: its names in other libraries.
_ON_POLICY = {
    "env.id": "env env_id env_name",
    "run.dir": "exp_name tensorboard_log train_dir experiment",
    "stop.env_steps": "total_timesteps train_for_env_steps",
    "stop.minutes": "train_for_seconds",
    "actors.count": "num_workers n_workers",
    "actors.envs": "num_envs_per_worker",
    "actors.count * actors.envs": "num_envs n_envs",
    "actors.unroll": "num_steps n_steps rollout recurrence",
    f"{_BATCH} / learner.updates_per_batch": "batch_size minibatch_size",
    "learner.updates_per_batch": "num_minibatches num_batches_per_epoch",
    "algo.epochs": "update_epochs n_epochs num_epochs",
    "learner.lr": "learning_rate",
    "learner.lr={from: 3e-4, to: 0}": "anneal_lr lr_schedule",
    "algo.discount": "gamma",
    "algo.clip": "clip_coef clip_range ppo_clip_ratio",
    "algo.value_clip": "clip_vloss clip_range_vf ppo_clip_value",
    "algo.entropy_cost": "ent_coef exploration_loss_coeff",
    "algo.value_cost": "vf_coef value_loss_coeff",
    "algo.normalize_advantages": "norm_adv normalize_advantage",
    "learner.grad_clip": "max_grad_norm",
    "learner.optimizer": "optimizer_class",
    "learner.eps": "adam_eps",
    "algo.normalize_rewards": "norm_reward normalize_returns",
    "model.normalize_observations": "norm_obs normalize_input",
    "model.hidden": "net_arch encoder_mlp_layers",
    "model.activation": "activation_fn nonlinearity",
    "model.kind": "encoder_conv_architecture",
    "model.core": "use_rnn rnn_type",
    "model.core_size": "lstm_hidden_size rnn_size",
    "model.core_inputs": "lstm_use_prev_action lstm_use_prev_reward",
    "model.critic": "share_features_extractor actor_critic_share_weights",
    "model.log_std_init": "initial_stddev",
    "algo.advantages=vtrace": "with_vtrace",
    "algo.rho_clip": "vtrace_rho",
    "algo.c_clip": "vtrace_c",
    "learner.device": "cuda",
    "transport.kind=inproc": "serial_mode",
    "transport.max_policy_lag=0": "async_rl",
    "checkpoint.every_s": "save_freq save_every_sec save_model",
    "eval.every_steps": "eval_freq",
    "eval.every_s": "save_best_every_sec",
    "eval.episodes": "n_eval_episodes",
    "env.wrappers": "wrapper_class",
    "model.entry": "features_extractor_class",
}
# The same for algorithms with replay, where a name may mean another option.
_REPLAY = {
    "replay.capacity": "buffer_size",
    "replay.min_size": "learning_starts",
    "replay.batch_size": "batch_size",
    "replay.samples_per_insert": "train_frequency train_freq gradient_steps",
    "algo.n_step": "n_steps",
    "algo.target_every": "target_network_frequency target_update_interval",
    "algo.epsilon={from: 1, to: 0.05, steps: N}": "start_e "
    "exploration_initial_eps end_e exploration_fraction exploration_final_eps",
    "algo.quantiles": "n_quantiles n_atoms",
    "algo.tune_alpha": "autotune",
    "algo.alpha": "ent_coef",
    "algo.hindsight=0.8": "n_sampled_goal goal_selection_strategy",
    "algo.policy_delay": "policy_frequency policy_freq",
    "algo.exploration_noise": "expl_noise action_noise",
    "algo.target_noise": "policy_noise target_policy_noise",
    "algo.target_noise_clip": "noise_clip",
    "learner.lr": "policy_lr q_lr",
}


def _by_foreign_name(table: dict[str, str]) -> dict[str, str]:
    """Returns Penstock's option by its name in another library."""
    return {name: option for option, names in table.items() for name in names.split()}


ON_POLICY = _by_foreign_name(_REPLAY) | _by_foreign_name(_ON_POLICY)
OFF_POLICY = _by_foreign_name(_ON_POLICY) | _by_foreign_name(_REPLAY)


def meant(name: str, algo: str) -> str | None:
    """Returns the equivalent of the option ``name`` of another library.

    It is a text with names of options. None if no library has the option, or has it under the same
    name. ``algo`` is the chosen algorithm: with replay some names mean another option.
    """
    spec = ALGORITHMS.specs.get(algo)
    is_off_policy = spec is not None and issubclass(spec.config, OffPolicyConfig)
    equivalents = OFF_POLICY if is_off_policy else ON_POLICY
    return equivalents.get(name.lower().replace("-", "_").lstrip("_"))
