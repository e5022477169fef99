"""The conventions of papers, and the defaults of codebases."""

import math

from rlcanary.contract.conventions import Conventions

GRPO = Conventions()
DR_GRPO = GRPO.replace(advantage_scale="none", aggregation="constant")
DAPO = GRPO.replace(clip_high=0.28, aggregation="token_mean")
RLOO = GRPO.replace(
    advantage_baseline="leave_one_out",
    advantage_scale="none",
    clip_low=None,
    clip_high=None,
    aggregation="sequence_sum",
)
GSPO = GRPO.replace(ratio_level="sequence", clip_low=3e-4, clip_high=4e-4)
GMPO = GRPO.replace(objective="gmpo", clip_low=1 - math.exp(-0.4), clip_high=math.exp(0.4) - 1)
SAPO = GRPO.replace(objective="sapo", clip_low=None, clip_high=None)
CISPO = GRPO.replace(objective="cispo", clip_low=None, clip_high=4.0, aggregation="token_mean")
PPO = GRPO.replace(
    advantage_baseline="none",
    advantage_scale="none",
    aggregation="token_mean",
    token_credit="gae",
    whitening="mean_std",
    value_clip=0.2,
)
REINFORCE_PP = PPO.replace(token_credit="returns", value_clip=None)
OPO = GRPO.replace(
    advantage_scale="none", clip_low=None, clip_high=None, aggregation="token_mean", baseline_weighting="tokens"
)

PAPERS = {
    "grpo": GRPO,
    "dr-grpo": DR_GRPO,
    "dapo": DAPO,
    "rloo": RLOO,
    "gspo": GSPO,
    "cispo": CISPO,
    "gmpo": GMPO,
    "sapo": SAPO,
}

# Papers whose advantages need the lengths of completions, or a critic, besides the rewards.
CREDIT_PAPERS = {"ppo": PPO, "reinforce++": REINFORCE_PP, "opo": OPO}

# Defaults of seven codebases, measured on their own functions.
CODEBASES = {
    "trl": GRPO.replace(
        advantage_eps=1e-4,
        nan_reward="exclude",
        aggregation="token_mean",
        kl_ratio_weighted=True,
        logprobs_upcast=False,
    ),
    "verl": GRPO.replace(
        singleton_group="reward",
        dual_clip=3.0,
        log_ratio_clamp=20.0,
        aggregation="token_mean",
        kl_input_clamp=20.0,
        kl_output_clamp=10.0,
        logprobs_upcast=False,
        old_logprobs="trainer",
        training_dropout=True,
        max_grad_norm=1.0,
        gae_lambda=1.0,
        value_clip=0.5,
    ),
    "nemo-rl": GRPO.replace(
        advantage_baseline="leave_one_out",
        advantage_eps_mode="skip",
        aggregation="token_mean",
        kl_coef=0.01,
        kl_input_clamp=20.0,
        kl_output_clamp=10.0,
        kl_score_term=True,
    ),
    "openrlhf": GRPO.replace(
        advantage_eps=1e-9,
        singleton_group="nan",
        log_ratio_clamp=20.0,
        aggregation="token_mean",
        kl_output_clamp=10.0,
        logprobs_upcast=False,
    ),
    "prime-rl": GRPO.replace(advantage_scale="none", clip_low=None, clip_high=None, aggregation="token_mean"),
    "torchrl": GRPO.replace(
        advantage_eps_mode="clamp",
        singleton_group="nan",
        aggregation="token_mean",
        entropy_coef=0.01,
        logprobs_upcast=False,
        max_grad_norm=1.0,
        whitening_singleton="nan",
    ),
    "rlvr-experiments": GRPO.replace(advantage_ddof=0, advantage_eps_mode="clamp", kl_coef=1e-3),
}
PRESETS = {**PAPERS, **CREDIT_PAPERS, **CODEBASES}
