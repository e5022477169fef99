"""The museum's bugs in the installed code of TRL: those of its history, and those of others whose code it has, too."""

from rlcanary.bugs.planted.plant import Change, Plant

GRPO = "trl.trainer.grpo_trainer:GRPOTrainer"
SCORE = f"{GRPO}._generate_and_score_completions"
LOSS = f"{GRPO}._compute_loss"
TURN = f"{GRPO}._generate_single_turn"
TOOLS = f"{GRPO}._tool_call_loop"
UTILS = "trl.trainer.utils"
KERNEL = "trl.kernels.chunked_divergence"

MIXTURE = "torch.logaddexp(log_ps + math.log(1 - beta), log_pt + math.log(beta))"
SWAPPED = "torch.logaddexp(log_ps + math.log(beta), log_pt + math.log(1 - beta))"
OF_ALL_RANKS = """\
            totals = self.accelerator.reduce(torch.stack([local_sum, local_count]), reduction="sum")
            return (totals[0] / totals[1].clamp(min=1.0)).item()
"""
ADDED_KL = "per_token_loss = per_token_loss + self.beta * per_token_kl"
ALL_IDS = "prompt_ids[idx_with_tool] + completion_ids[idx_with_tool] + suffix_ids"
ALL_TOKENS = "self.accelerator.gather(torch.tensor(sum(map(len, completion_ids_list)), device=device)).sum()"
NORMALIZER = 'normalizer = inputs["num_items_in_batch"].clamp(min=1.0) / self.accelerator.num_processes'
PER_WINDOW = "normalizer = normalizer * self.current_gradient_accumulation_steps / self.args.steps_per_generation"
SCALED = "advantages = advantages / (std_rewards + 1e-4)\n        is_std"
COUNTED = "local_sum, local_count = (x * mask).sum(), mask.sum().float()"


def _encoded_again() -> tuple[Change, ...]:
    again = "self._tokenizer.encode(self._tokenizer.decode({}), add_special_tokens=False)"
    parts = ("prompt_ids[idx_with_tool]", "completion_ids[idx_with_tool]")
    return (Change(TOOLS, ALL_IDS, " + ".join([*map(again.format, parts), "suffix_ids"])),)


OWN = (
    Plant(
        "trl.permuted-scale",
        (
            Change(
                SCORE,
                'if self.scale_rewards != "none":\n                advantages',
                'if self.scale_rewards == "none":\n                advantages',
            ),
        ),
    ),
    Plant(
        "trl.entropy-quantile-per-rank",
        (Change(f"{GRPO}.get_high_entropy_mask", "self.accelerator.gather(padded)", "padded"),),
    ),
    Plant(
        "trl.scored-without-temperature",
        (
            Change(
                f"{UTILS}:add_fused_lm_head",
                "                temperature,\n                _CHUNKED",
                "                1.0,\n                _CHUNKED",
            ),
        ),
        through=("completion_logprobs",),
    ),
    Plant(
        "trl.no-attention-mask",
        (
            Change(
                f"{GRPO}._get_per_token_logps_and_entropies",
                '{"input_ids": input_ids_batch, "attention_mask": attention_mask_batch}',
                '{"input_ids": input_ids_batch}',
            ),
        ),
    ),
    Plant(
        "trl.logits-one-late",
        (Change(f"{UTILS}:add_fused_lm_head", "last_hidden_state[:, :-1]", "last_hidden_state[:, 1:]"),),
    ),
    Plant(
        "trl.mask-by-pad-id",
        (
            Change(
                SCORE,
                "[torch.ones_like(ids, dtype=torch.long) for ids in completion_ids]",
                "[(ids != self._tokenizer.pad_token_id).long() for ids in completion_ids]",
            ),
        ),
        through=("make_batch",),
    ),
    Plant(
        "trl.distillation-mixture",
        (Change(f"{KERNEL}:_jsd_tile", MIXTURE, SWAPPED), Change(f"{KERNEL}:_backward_tile", MIXTURE, SWAPPED)),
    ),
    Plant(
        "trl.distillation-limits",
        (
            Change(
                f"{KERNEL}:ChunkedDivergenceFunction.forward",
                "if beta == 0.0:\n            divergence",
                "if beta == 1.0:\n            divergence",
            ),
            Change(
                f"{KERNEL}:ChunkedDivergenceFunction.forward",
                "elif beta == 1.0:\n            divergence",
                "elif beta == 0.0:\n            divergence",
            ),
            Change(
                f"{KERNEL}:ChunkedDivergenceFunction.forward",
                "0 if beta == 0.0 else 1 if beta == 1.0 else 2",
                "1 if beta == 0.0 else 0 if beta == 1.0 else 2",
            ),
        ),
    ),
    Plant("trl.local-denominator", (Change(LOSS, "totals[1].clamp(min=1.0)", "local_count.clamp(min=1.0)"),)),
    Plant(
        "trl.metric-mean-of-means",
        (
            Change(
                LOSS,
                OF_ALL_RANKS,
                "            return self.accelerator.gather(local_sum / local_count.clamp(min=1.0)).mean().item()\n",
            ),
        ),
    ),
    Plant(
        "trl.truncated-over-local-count",
        (
            Change(
                f"{GRPO}._generate",
                "agg_is_truncated.float().mean().item()",
                "1 - (~agg_is_truncated).sum().item() / len(is_truncated)",
            ),
        ),
    ),
    Plant(
        "trl.logged-reward-without-weights",
        (
            Change(
                SCORE,
                "(rewards_per_func * self.reward_weights.to(rewards_per_func.device).unsqueeze(0)).nansum(dim=1)",
                "rewards_per_func.nansum(dim=1)",
            ),
        ),
        through=("combine_rewards",),
    ),
    Plant("trl.rendered-from-text", _encoded_again()),
    Plant("trl.turns-encoded-again", _encoded_again()),
    Plant(
        "trl.no-tool-calls-is-no-limit",
        (
            Change(
                f"{GRPO}.__init__",
                "args.max_tool_calling_iterations if args.max_tool_calling_iterations is not None else sys.maxsize",
                "args.max_tool_calling_iterations or sys.maxsize",
            ),
        ),
    ),
    Plant(
        "trl.zero-taken-for-missing",
        (
            Change(
                f"{GRPO}.__init__",
                "args.epsilon_high if args.epsilon_high is not None else args.epsilon",
                "args.epsilon_high or args.epsilon",
            ),
        ),
        through=("effective",),
    ),
    Plant(
        "trl.template-stripped",
        (
            Change(
                TURN,
                "prompts=prompt_ids,",
                "prompts=[[i for i in ids if i not in self.processing_class.all_special_ids] for ids in prompt_ids],",
            ),
        ),
    ),
    Plant(
        "trl.padding-sent-to-sampler",
        (
            Change(
                TURN,
                "prompts=prompt_ids,",
                "prompts=pad([torch.tensor(ids) for ids in prompt_ids], self._tokenizer.pad_token_id, 'left').tolist(),",
            ),
        ),
    ),
    Plant(
        "trl.old-logprobs-not-reindexed",
        (
            Change(
                f"{UTILS}:shuffle_sequence_dict",
                "key: permute(val) for",
                "key: val if key == 'old_per_token_logps' else permute(val) for",
            ),
        ),
        through=("rl_step",),
    ),
    Plant(
        "trl.weights-in-half-precision",
        (
            Change(
                f"{GRPO}.__init__",
                "        super().__init__(\n            model=model,",
                "        model = model.to(torch.bfloat16)\n        super().__init__(\n            model=model,",
            ),
        ),
    ),
    Plant(
        "trl.truncated-tokens-counted",
        (Change(SCORE, "self.accelerator.gather(loss_mask.sum()).sum()", ALL_TOKENS),),
    ),
)

OTHERS = (
    Plant("verl.kl-subtracted", (Change(LOSS, ADDED_KL, ADDED_KL.replace("+", "-")),)),
    Plant("skyrl.kl-without-gradient", (Change(LOSS, ADDED_KL, f"{ADDED_KL}.detach()"),)),
    Plant(
        "rlvr.kl-ratio-inverted",
        (
            Change(
                LOSS,
                "torch.exp(ref_per_token_logps - per_token_logps) - (ref_per_token_logps - per_token_logps) - 1",
                "torch.exp(per_token_logps - ref_per_token_logps) - (per_token_logps - ref_per_token_logps) - 1",
            ),
        ),
        through=("policy_loss",),
    ),
    Plant(
        "openrlhf.kl-over-padding",
        (Change(LOSS, COUNTED, "local_sum, local_count = x.sum(), mask.sum() * 0.0 + x.numel()"),),
    ),
    Plant(
        "nemo-rl.sum-over-micro-batches",
        (Change(LOSS, PER_WINDOW, "normalizer = normalizer / self.args.steps_per_generation"),),
    ),
    Plant(
        "nemo-rl.mean-of-means",
        (
            Change(
                LOSS, PER_WINDOW, "normalizer = mask.sum().clamp(min=1.0) * self.current_gradient_accumulation_steps"
            ),
        ),
    ),
    Plant("prime-rl.normalised-by-rank", (Change(LOSS, NORMALIZER, "normalizer = mask.sum().clamp(min=1.0)"),)),
    Plant(
        "slime.tool-tokens-counted",
        (
            Change(
                SCORE,
                "loss_mask = completion_mask if tool_mask is None else completion_mask * tool_mask",
                "loss_mask = completion_mask",
            ),
        ),
        through=("train_step",),
    ),
    Plant(
        "nemo-rl.threshold-never-applied",
        (Change(LOSS, "per_token_loss = per_token_loss * off_policy_mask", "pass"),),
    ),
    Plant(
        "prime-rl.advantages-summed",
        (
            Change(
                LOSS,
                "advantages = advantages.unsqueeze(1)",
                "advantages = advantages.sum().expand_as(advantages).unsqueeze(1)",
            ),
        ),
    ),
    Plant(
        "verl.token-sum-divided-by-length",
        (
            Change(
                LOSS,
                "loss = (per_token_loss * mask).sum(-1).mean()",
                "loss = ((per_token_loss * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).mean()",
            ),
        ),
    ),
    Plant(
        "rlvr.batch-instead-of-group",
        (
            Change(
                SCORE,
                "mean_grouped_rewards = torch.nanmean(rewards.view(-1, num_generations), dim=1)",
                "mean_grouped_rewards = torch.nanmean(rewards).expand(len(rewards) // num_generations)",
            ),
        ),
    ),
    Plant(
        "gem.normalised-twice",
        (
            Change(
                SCORE,
                "advantages = torch.nan_to_num(advantages, nan=0.0)",
                "advantages = torch.nan_to_num((advantages - advantages.mean()) / (advantages.std() + 1e-4), nan=0.0)",
            ),
        ),
    ),
    Plant(
        "verl.only-first-eos-id",
        (Change(TURN, "torch.tensor(self.eos_token_ids,", "torch.tensor(self.eos_token_ids[:1],"),),
    ),
    Plant(
        "nemo-rl.history-trained",
        (Change(TOOLS, "+= [0] * tool_length + [1]", "+= [1] * tool_length + [1]"),),
        through=("converse",),
    ),
    Plant(
        "verl.synced-only-once",
        (
            Change(
                "trl.generation.vllm_generation:VLLMGeneration.sync_weights",
                "accelerator = self.accelerator\n",
                "accelerator = self.accelerator\n        if self._weight_metadata is not None:\n            return\n",
            ),
        ),
    ),
    Plant(
        "torchrl.token-id-as-logprob",
        (
            Change(
                "trl.generation.vllm_client:parse_logprobs",
                "None if math.isnan(logprob) else logprob for _, logprob in items",
                'float(token.removeprefix("token_id:")) for token, _ in items',
            ),
        ),
        through=("rollout",),
    ),
    Plant(
        "areal.epoch-never-set",
        (
            Change(
                f"{UTILS}:RepeatSampler.__iter__",
                "generator=self.generator",
                "generator=torch.Generator().manual_seed(self.seed)",
            ),
        ),
    ),
    Plant(
        "areal.drop-last-in-the-sampler-alone",
        (
            Change(
                f"{UTILS}:RepeatSampler.__iter__",
                "for chunk in indexes if len(chunk) == self.batch_size",
                "for chunk in indexes",
            ),
            Change(
                f"{UTILS}:RepeatSampler.__len__",
                "(self.num_samples // self.batch_size) * self.batch_size *",
                "self.num_samples *",
            ),
        ),
        through=("data_order",),
    ),
)

PLANTS = OWN + OTHERS

ELSEWHERE = {
    "trl.values-one-early": "PPOTrainer is experimental, and the adapter has no critic",
    "trl.head-in-no-optimizer": "PPOTrainer is experimental; the others leave the optimizer to transformers",
    "trl.logprobs-not-filtered": "GFPOTrainer is experimental",
    "trl.tool-marks-forgotten": "the trainer with a replay buffer is experimental",
    "trl.thoughts-without-their-opening": "the training templates stand for those of known models; the checks have another",
    "trl.kl-weighted-by-the-row": "this release has the bug: config.kl_options fails",
    "trl.distilled-one-position-late": "DistillationTrainer slices the hidden states before the loss that the adapter calls",
    "trl.mask-behind-the-divergence": "it is in the loss of a teacher behind a server, which the adapter does not drive",
    "trl.hard-labels-in-the-fused-loss": "this release has no Liger loss",
    "trl.cross-entropy-in-fused-loss": "this release has no Liger loss",
    "trl.one-path-before-temperature": "the mode of logprobs is an option of vLLM; the engine of the checks takes its place",
    "trl.samples-of-the-last-micro-batch": "this release fills its table by one call for all micro-batches",
    "trl.first-token-cut": "pairs of preferences are rendered by DPOTrainer's preparation, which the adapter does not call",
}
