"""torchrl's validation hook, with the wrapper of vLLM answering the items from an engine that has the trainer's weights."""

from __future__ import annotations

from typing import Any

from rlcanary.adapters.frameworks import quiet
from rlcanary.adapters.torchrl.base import TorchrlBase
from rlcanary.adapters.torchrl.rollouts import environment_of, item_reward, prompted, text_of
from rlcanary.adapters.torchrl.vllm_engine import as_vllm, generate_kwargs, require_answers_by_ids
from rlcanary.contract.adapter import NotProvided
from rlcanary.contract.sampling import Sampling

MAX_NEW_TOKENS = 8


class Evaluating(TorchrlBase):
    """Evaluations between updates."""

    def evaluate(self, state: Any) -> dict[str, float]:
        from tensordict import set_list_to_stack
        from torchrl.envs import StepCounter
        from torchrl.modules.llm import vLLMWrapper
        from torchrl.trainers import LogValidationReward

        from rlcanary.tiny_models import tiny_tokenizer

        items = state.eval_items
        require_answers_by_ids()
        if not items:
            raise NotProvided("there are no items to evaluate on")
        tokenizer = prompted(tiny_tokenizer(), {text_of(item): list(item.prompt_ids) for item in items})
        with quiet(), set_list_to_stack(True):
            env = environment_of(items, tokenizer, repeats=1)
            env.append_transform(StepCounter(max_steps=1))
            env.append_transform(item_reward(items, tokenizer))
            request = Sampling(temperature=0.0, max_new_tokens=MAX_NEW_TOKENS, eos_token_ids=(tokenizer.eos_token_id,))
            policy = vLLMWrapper(
                as_vllm(self.new_engine(state.model), tokenizer.eos_token_id),
                tokenizer=tokenizer,
                generate_kwargs=generate_kwargs(request, tokenizer.eos_token_id),
            )
            hook = LogValidationReward(record_interval=1, record_frames=1, policy_exploration=policy, environment=env)
            logged = hook(None)
        return {"reward": float(logged["r_evaluation"])}
