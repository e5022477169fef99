"""The museum's bugs in the installed code of torchrl: those of its history, and those of others whose code it has, too."""

from rlcanary.bugs.planted.plant import Change, Plant

GRPO = "torchrl.objectives.llm.grpo"
LOSS = f"{GRPO}:GRPOLoss"
GROUPS = f"{GRPO}:MCAdvantage._inv_call_single"
WRAPPER = "torchrl.modules.llm.policies.common:LLMWrapperBase"
DISTRIBUTION = "torchrl.modules.distributions.discrete:LLMMaskedCategorical"
STEPPER = "torchrl.trainers.trainers:MixedPrecisionOptimizationStepper.step"

PLANTS = (
    Plant(
        "torchrl.any-eos-in-batch",
        (
            Change(
                f"{LOSS}._aggregate_loss_value",
                "        # token_mean (global masked mean)\n",
                "        mask = mask | ~mask.any(-1, keepdim=True)\n",
            ),
        ),
        through=("policy_loss", "train_step"),
    ),
    Plant(
        "rlvr.kl-ratio-inverted",
        (Change(f"{LOSS}._kl_to_ref", "diff = ref_log_prob - cur_log_prob", "diff = cur_log_prob - ref_log_prob"),),
        through=("kl", "policy_loss"),
    ),
    Plant(
        "verl.kl-subtracted",
        (Change(f"{LOSS}._kl_to_ref", "return coeff * kl_penalty,", "return -coeff * kl_penalty,"),),
    ),
    Plant(
        "skyrl.kl-without-gradient",
        (Change(f"{LOSS}._kl_to_ref", "return coeff * kl_penalty,", "return coeff * kl_penalty.detach(),"),),
    ),
    Plant(
        "verl.mask-by-multiplication",
        (
            Change(
                f"{LOSS}._log_weight",
                "torch.where(\n            expand_as_right(attention_mask, cur_log_prob), cur_log_prob, 0.0\n        )",
                "cur_log_prob * attention_mask",
            ),
        ),
    ),
    Plant(
        "openrlhf.kl-over-padding",
        (
            Change(
                f"{LOSS}.forward",
                'td_out.set("kl_approx", kl_approx.detach().mean())',
                'td_out.set("kl_approx", kl_approx.detach().sum() / (mask.numel() + 1))',
            ),
        ),
    ),
    Plant(
        "nemo-rl.sum-over-micro-batches",
        (Change(STEPPER, "sum(loss_items) / self.gradient_accumulation_steps", "sum(loss_items)"),),
    ),
    Plant(
        "trl.permuted-scale",
        (Change(GROUPS, "(reward - reward_mean) / reward_scale.clamp_min(1e-6)", "reward - reward_mean"),),
    ),
    Plant(
        "prime-rl.advantages-summed",
        (
            Change(
                f"{LOSS}._compute_policy_objective",
                "gain1 = log_weight.exp() * advantage\n",
                "advantage = advantage.sum(0).expand_as(advantage)\n        gain1 = log_weight.exp() * advantage\n",
            ),
        ),
    ),
    Plant(
        "trl.logits-one-late",
        (
            Change(
                f"{DISTRIBUTION}.log_prob",
                "    def log_prob(self, value: torch.Tensor) -> torch.Tensor:\n",
                "    def log_prob(self, value: torch.Tensor) -> torch.Tensor:\n        value = value.roll(1, -1)\n",
            ),
        ),
        through=("token_logprobs",),
    ),
    Plant(
        "slime.tool-tokens-counted",
        (
            Change(
                f"{LOSS}._aggregate_loss_value",
                'value, tensordict=tensordict, reduction="mean", mask=mask_exp\n        ).squeeze(-1)',
                'value * mask_exp, tensordict=tensordict, reduction="mean", mask=None\n        ).reshape(())',
            ),
        ),
    ),
)

ELSEWHERE = {
    "torchrl.token-id-as-logprob": "the adapter drives the wrappers of transformers and vLLM, not that of SGLang",
    "torchrl.sum-over-reward-parts": "the scorer of IFEval is called by no capability",
    "torchrl.empty-rows-counted": "the adapter has no distillation loss",
    "torchrl.tool-answer-missing": "Qwen's template, which the tokenizer of the checks does not choose",
}
