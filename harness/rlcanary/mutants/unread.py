"""What capabilities have no reason to read or give, so that ignoring it is no mistake."""

from dataclasses import fields

from rlcanary.contract.records.layouts import Layout

# Fields of a record that a capability has no reason to read or give: it scores tokens, trains whatever the age of a row, has
# no place for them in its result, rewards text, or was not told them, or need not tell.
SCORES_TOKENS = ("rewards", "group_ids", "old_logprobs", "ref_logprobs", "policy_versions", "item_ids")
UNREAD: dict[str, tuple[str, ...]] = {
    "completion_logprobs": SCORES_TOKENS,
    "packed_logprobs": SCORES_TOKENS,
    "values": (*SCORES_TOKENS, "completion_ids", "completion_mask"),
    "train_step": ("policy_versions", "item_ids"),
    "make_batch": ("dataset", "token_versions", "text"),
    # Of the tokens of a row their number is enough.
    "replayed_routes": ("token_ids",),
    "combine_rewards": ("names",),
    # A penalty is for the completion's length alone.
    "shape_rewards": ("prompts", "max_prompt_tokens"),
    "rl_step": ("dataset", "finish_reason", "item_id", "policy_version", "token_versions", "text"),
    "rollout": ("ref_logprobs", "dataset", "text"),
    "converse": ("token_versions", "text"),
    "score": ("id", "prompt_ids"),
    "new_buffer": ("first_version",),
    "load_buffer": ("first_version",),
    "put_groups": ("dataset", "finish_reason", "text"),
    "take_groups": ("stale",),
    # Code need not tell what it dropped, and what an adapter lists of its own settings is no computation.
    "prepare": ("dropped",),
    "list_settings": ("name", "values", "derived_from"),
    "rollout_metrics": ("prompt_ids", "logprobs", "ref_logprobs", "item_id", "token_versions", "text", "step"),
    "evaluation_metrics": ("item_id",),
    "logged_samples": (
        *("logprobs", "ref_logprobs", "item_id", "policy_version", "token_versions", "dataset", "finish_reason"),
        *("sampled", "token_ids", "trainer_version", "eos_token_ids"),
    ),
}

UNREAD |= {
    "shard_rows": (
        *("rewards", "group_ids", "policy_versions", "item_ids", "completion_ids"),
        *("data_parallel", "tensor_parallel", "pipeline_parallel", "expert_parallel", "micro_batches"),
    ),
    "gathered_logprobs": (
        *(*SCORES_TOKENS, "input_ids", "position_ids", "completion_ids", "completion_mask"),
        *("data_parallel", "tensor_parallel", "pipeline_parallel", "expert_parallel", "micro_batches"),
    ),
    # The reference's update is the same in every layout.
    "sharded_update": (*UNREAD["train_step"], *(each.name for each in fields(Layout))),
}

# The loop's own counts are tested, so no batch tells any; one temperature is enough for it.
UNREAD |= dict.fromkeys(
    ("accumulated_other_loss", "sharded_other_loss"),
    ("global_tokens", "global_sequences", "global_pairs", "temperature"),
)

# Sampling parameters that the contract promises to no capability.
NOT_GIVEN = (
    *("logprobs", "repetition_penalty", "presence_penalty", "frequency_penalty", "stop_sequences"),
    *("skip_special_tokens", "min_p", "min_tokens"),
)
