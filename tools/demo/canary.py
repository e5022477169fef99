"""The adapter that the team writes once: the conventions of its code, and the calls to it."""

from tinygrpo import loss
from tinygrpo.advantages import group_advantages

from rlcanary.adapters import Adapter, NotProvided
from rlcanary.contract.batch import LossOutput
from rlcanary.contract.conventions import Conventions


class TinyGRPO(Adapter):
    name = "tinygrpo"
    conventions = Conventions(advantage_scale="group", advantage_eps=1e-4, aggregation="token_mean", kl_coef=0.02)

    def configured(self, **changes):
        if changes.keys() != {"kl_coef"}:
            raise NotProvided("this adapter can change kl_coef only")
        adapter = TinyGRPO()
        adapter.conventions = self.conventions.replace(**changes)
        return adapter

    def token_logprobs(self, logits, token_ids, temperature):
        return loss.token_logprobs(logits, token_ids, temperature)

    def completion_mask(self, completion_ids, eos_token_ids, pad_token_id):
        return loss.completion_mask(completion_ids, eos_token_ids)

    def advantages(self, rewards, group_ids):
        return group_advantages(rewards, group_ids)

    def kl(self, logprobs, ref_logprobs):
        return loss.kl(logprobs, ref_logprobs)

    def policy_loss(self, batch):
        if batch.advantages.ndim == 2:
            raise NotProvided("tinygrpo has one advantage per completion")
        return LossOutput(
            *loss.policy_loss(
                batch.logprobs,
                batch.old_logprobs,
                batch.ref_logprobs,
                batch.advantages,
                batch.mask,
                beta=self.conventions.kl_coef,
            )
        )
