"""The museum's bugs in the installed code of verl: those of its history, and those of others whose code it has, too."""

from rlcanary.adapters.verl.workers.transfer_queue import trainer_module
from rlcanary.bugs.planted.plant import Change, Plant

CORE = "verl.trainer.ppo.core_algos"
TRAINER = "verl.trainer.ppo.v1.trainer_base:PPOTrainer"
ENGINE = "verl.workers.engine.fsdp.transformer_impl"
HEAD = f"{ENGINE}:FSDPEngineWithLMHead"
LOSS = "verl.workers.utils.losses:ppo_loss"
TORCH = "verl.utils.torch_functional"
METRIC = "verl.utils.metric.utils"
GAE = f"{CORE}:compute_gae_advantage_return"
GRPO = f"{CORE}:compute_grpo_outcome_advantage"

NEXT_VALUE = "nextvalues = values[:, t] * response_mask[:, t] + (1 - response_mask[:, t]) * nextvalues"
NEXT_GAE = "lastgaelam = lastgaelam_ * response_mask[:, t] + (1 - response_mask[:, t]) * lastgaelam"
CARRIED = "running_return = new_running_return * response_mask[:, t] + running_return * (1 - response_mask[:, t])"


def prepare() -> None:
    """Import the trainer, whose module imports another one that may not be installed."""
    trainer_module()


OWN = (
    Plant(
        "verl.returns-end-at-tools",
        (Change(f"{CORE}:compute_reinforce_plus_plus_outcome_advantage", CARRIED, CARRIED.partition(" + ")[0]),),
    ),
    Plant(
        "miles.gae-over-tool-tokens",
        (Change(GAE, NEXT_VALUE, "nextvalues = values[:, t]"), Change(GAE, NEXT_GAE, "lastgaelam = lastgaelam_")),
    ),
    Plant(
        "verl.value-loss-factor",
        (Change(f"{CORE}:compute_value_loss", "vf_loss = 0.5 * agg_loss(", "vf_loss = agg_loss("),),
    ),
    Plant(
        "verl.sampler-state-not-saved",
        (
            Change(
                f"{TRAINER}._load_checkpoint", "self.train_dataloader.load_state_dict(dataloader_state_dict)", "pass"
            ),
        ),
        through=("resumed_order",),
    ),
    Plant(
        "verl.token-sum-divided-by-length",
        (
            Change(
                f"{CORE}:agg_loss",
                "torch.sum(loss_mat * loss_mask, dim=-1)  # token-sum",
                "torch.sum(loss_mat * loss_mask, dim=-1) / loss_mask.sum(-1).clamp(min=1)",
            ),
        ),
    ),
    Plant(
        "verl.importance-weights-with-gradient",
        (
            Change(
                "verl.trainer.ppo.rollout_corr_helper:compute_rollout_correction_weights",
                "rollout_is_weights = rollout_is_weights.detach()",
                "pass",
            ),
        ),
    ),
    Plant(
        "verl.kl-subtracted",
        (Change(LOSS, "policy_loss += kl_loss * config.kl_loss_coef", "policy_loss -= kl_loss * config.kl_loss_coef"),),
    ),
    Plant(
        "verl.advantages-as-mask",
        (
            Change(
                LOSS,
                "response_mask=response_mask,\n        loss_agg_mode=loss_agg_mode,\n        config=config,",
                "response_mask=advantages,\n        loss_agg_mode=loss_agg_mode,\n        config=config,",
            ),
        ),
    ),
    Plant(
        "verl.mask-by-multiplication",
        (Change(f"{TORCH}:masked_sum", "torch.where(mask.bool(), values, 0.0)", "values"),),
    ),
    Plant(
        "verl.divided-after-backward",
        (
            Change(
                f"{ENGINE}:FSDPEngine.forward_backward_batch",
                "loss.backward()\n                    if",
                "(loss * len(micro_batches)).backward()\n                    if",
            ),
        ),
    ),
    Plant(
        "verl.metrics-of-rank-zero",
        (Change(f"{METRIC}:Metric.aggregate_dp", "np.mean(value_arrays, axis=0)", "value_arrays[0]"),),
    ),
    Plant(
        "verl.metrics-of-the-first-worker",
        (
            Change(
                "verl.utils.py_functional:append_to_dict",
                "data[new_key].append(val)",
                "data[new_key].append(val) if not getattr(data[new_key], 'values', data[new_key]) else None",
            ),
        ),
    ),
    Plant(
        "verl.reduced-by-name",
        (
            Change(
                f"{METRIC}:reduce_metrics",
                "if isinstance(val, Metric):",
                "val = getattr(val, 'values', val)\n        if False:",
            ),
        ),
    ),
    Plant(
        "verl.position-ids-ignored",
        (
            Change(
                f"{HEAD}.prepare_model_inputs",
                '"position_ids": position_ids_rmpad,\n',
                '"position_ids": torch.arange(position_ids_rmpad.shape[-1]).expand_as(position_ids_rmpad),\n',
            ),
        ),
        through=("packed_logprobs",),
    ),
    Plant(
        "verl.one-backend-without-temperature",
        (
            Change(
                f"{HEAD}.prepare_model_outputs",
                "temperature = temperature.unsqueeze(-1).unsqueeze(-1)",
                "temperature = torch.ones_like(temperature).unsqueeze(-1).unsqueeze(-1)",
            ),
        ),
    ),
    Plant(
        "verl.token-ids-as-attention-mask",
        (Change(f"{HEAD}.prepare_model_inputs", '"attention_mask": attention_mask,', '"attention_mask": input_ids,'),),
    ),
    Plant(
        "verl.only-first-eos-id",
        (
            Change(
                f"{TORCH}:get_response_mask",
                "torch.tensor(eos_token,",
                "torch.tensor(eos_token[0] if isinstance(eos_token, list) and eos_token else eos_token,",
            ),
        ),
    ),
    Plant(
        "verl.evaluated-at-training-temperature",
        (
            Change(
                "verl.trainer.ppo.v1.agent_loop_tq:AgentLoopWorkerTQ.generate_sequences",
                'sampling_params["temperature"] = config.val_kwargs.temperature',
                "pass",
            ),
        ),
    ),
    Plant(
        "verl.scored-with-dropout",
        (
            Change(
                f"{ENGINE}:EngineEvalModeCtx.__enter__",
                "self.engine.module.eval()",
                "self.engine.module.train()",
            ),
        ),
    ),
    Plant(
        "verl.first-learning-rate-zero",
        (
            Change(
                f"{TORCH}:get_constant_schedule_with_warmup",
                "if current_step < num_warmup_steps:\n            return float(current_step)",
                "if current_step < max(1.0, num_warmup_steps):\n            return float(current_step)",
            ),
        ),
        through=("build",),
    ),
)

OTHERS = (
    Plant(
        "rlvr.kl-ratio-inverted",
        (Change(f"{CORE}:kl_penalty_forward", "kl = ref_logprob - logprob\n", "kl = logprob - ref_logprob\n"),),
        through=("kl", "policy_loss"),
    ),
    Plant(
        "skyrl.kl-without-gradient",
        (Change(LOSS, "policy_loss += kl_loss * config", "policy_loss += kl_loss.detach() * config"),),
    ),
    Plant(
        "nemo-rl.sum-over-micro-batches",
        (
            Change(
                f"{ENGINE}:FSDPEngine.forward_backward_batch",
                "loss.backward()\n                    if",
                "(loss * len(micro_batches)).backward()\n                    if",
            ),
        ),
    ),
    Plant(
        "nemo-rl.mean-of-means",
        (
            Change(
                LOSS,
                'config.global_batch_info["batch_num_tokens"] = data["batch_num_tokens"]',
                'config.global_batch_info["batch_num_tokens"] = '
                'data["loss_mask"].values().sum() * data["global_batch_size"] / len(data)',
            ),
        ),
        through=("accumulated_loss",),
    ),
    Plant(
        "prime-rl.normalised-by-rank",
        (
            Change(
                f"{ENGINE}:FSDPEngine.forward_backward_batch",
                "batch_num_tokens=batch_num_tokens.item()",
                'batch_num_tokens=data["loss_mask"].sum().item() * self.get_data_parallel_size()',
            ),
        ),
    ),
    Plant(
        "trl.scored-without-temperature",
        (
            Change(
                f"{HEAD}.prepare_model_outputs",
                "temperature_rmpad.unsqueeze(-1),",
                "torch.ones_like(temperature_rmpad).unsqueeze(-1),",
            ),
        ),
    ),
    Plant(
        "trl.logits-one-late",
        (
            Change(
                f"{HEAD}.prepare_model_inputs",
                "torch.roll(input_ids.values(), shifts=-1, dims=0)",
                "input_ids.values().clone()",
            ),
        ),
    ),
    Plant(
        "trl.permuted-scale",
        (Change(GRPO, "if norm_adv_by_std_in_grpo:", "if not norm_adv_by_std_in_grpo:"),),
    ),
    Plant(
        "rlvr.batch-instead-of-group",
        (Change(GRPO, "id2score[index[i]].append(scores[i])", "id2score[index[i]] = list(scores.clone())"),),
    ),
    Plant(
        "areal.single-reward-erased",
        (Change(GRPO, "id2mean[idx] = torch.tensor(0.0)", "id2mean[idx] = id2score[idx][0].clone()"),),
    ),
    Plant(
        "slime.tool-tokens-counted",
        (
            Change(
                f"{ENGINE}:FSDPEngine.forward_backward_batch",
                'batch_num_tokens = data["loss_mask"].sum()',
                'batch_num_tokens = torch.tensor(data["responses"].values().numel())',
            ),
        ),
        through=("train_step",),
    ),
    Plant(
        "nemo-rl.extremes-averaged",
        (
            Change(f"{METRIC}:Metric._aggregate", "return np.max(values)", "return np.mean(values)"),
            Change(f"{METRIC}:Metric._aggregate", "return np.min(values)", "return np.mean(values)"),
        ),
        through=("merged_metrics",),
    ),
    Plant(
        "nemo-rl.history-trained",
        (
            Change(
                "verl.trainer.ppo.v1.agent_loop_tq:AgentLoopWorkerTQ._agent_loop_postprocess",
                'field["loss_mask"] = field["response_mask"]',
                'field["response_mask"] = field["loss_mask"] = torch.ones_like(field["response_mask"])',
            ),
        ),
        through=("make_batch",),
    ),
)

PLANTS = OWN + OTHERS

ELSEWHERE = {
    "verl.kl-switches-tied": "without a KL this release scores no reference, so that the mistake raises",
    "verl.empty-rows-in-denominator": "the engine gives the number of rows of the whole update; none counts them itself",
    "verl.divided-by-all-ranks": "batch sizes are divided for workers that this release no longer has",
    "verl.routing-replayed-to-wrong-layer": "routes are replayed in Megatron, which needs an accelerator",
    "verl.continued-past-the-limit": "the server of vLLM computes the limit, and the checks have an engine of their own",
    "verl.generation-prompt-left-in": "the chat schema that added turns is gone",
    "verl.tool-branch-never-taken": "the loop has no branch for that parser any more",
    "verl.longest-counts-as-truncated": "this release has the bug; the adapter leaves that number out",
    "verl.sampler-only-penalty": "vLLM's server is started on an accelerator; the engine of the checks takes its place",
    "verl.ignore-eos-never-passed-on": "it is in vLLM's server, as verl.sampler-only-penalty",
    "verl.packed-as-memory-lies": "buckets are packed on the way to vLLM; the engine of the checks takes their place",
    "verl.derived-weights-stale": "vLLM derives weights behind its own loading; the engine of the checks takes its place",
    "verl.synced-only-once": "the manager of servers wakes them, and the adapter calls the worker behind it",
    "verl.only-lora-synced": "adapters are sent apart, which the adapter declines",
    "verl.old-logprobs-of-other-kernels": "on the CPU there is one kernel",
    "verl.workload-logged-as-tokens": "the adapter names no number of tokens",
}
