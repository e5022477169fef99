"""The schedule of a run: `rlcanary.grpo.plan.schedule.Schedule`."""

from rlcanary.grpo.plan.schedule import Schedule


def _compute_schedule(training_cfg):
    """Return the cadences of a configuration in prompts, as numbers of optimizer steps."""
    prompts = training_cfg["prompts_per_optim_step"]
    schedule = Schedule(
        prompts_per_step=prompts,
        group_size=1,
        rows_per_micro_batch=training_cfg["prompts_per_forward_backward"],
        sync_every=training_cfg["prompts_per_rollout_sync"] // prompts,
        max_staleness=training_cfg.get("max_staleness", 0),
        refresh_reference_every=training_cfg["prompts_per_reference_sync"] // prompts,
    )
    return {
        "accumulation_steps": schedule.micro_batches_per_update,
        "sync_model_every": schedule.sync_every,
        "sync_ref_every": schedule.refresh_reference_every,
        "max_staleness": schedule.max_staleness,
    }
