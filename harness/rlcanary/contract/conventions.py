"""Conventions: the choices that an implementation declares, against which the checks test it.

GRPO implementations differ legitimately: the standard deviation of a group with or without Bessel's correction, a loss
averaged over tokens or over sequences, a KL estimator. None of these is a bug. Declaring one and computing another is.
"""

from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any, Literal, Self, get_args, get_type_hints

from rlcanary.contract.ranges import out_of_range

# "custom" or a function. Any spares code that knows the words alone from telling the two apart.
Custom = Any

Baseline = Literal["mean", "leave_one_out", "none"]
Scale = Literal["group", "batch", "none"]
EpsMode = Literal["add", "clamp", "skip"]
SingletonGroup = Literal["zero", "reward", "nan"]
NanReward = Literal["raise", "exclude"]
Objective = Literal["clip", "cispo", "reinforce", "gmpo", "sapo"]
RatioLevel = Literal["token", "sequence"]
ClipBounds = Literal["fixed", "dynamic"]
Aggregation = Literal[
    "token_mean",
    "sequence_mean",
    "sequence_mean_nonempty",
    "sequence_sum",
    "sequence_sum_nonempty",
    "constant",
    "group_token_mean",
]
KlEstimator = Literal["k1", "k2", "k3", "abs"]
ApproxKlEstimator = Literal["k1", "k2", "k3"]
KlDirection = Literal["policy_to_reference", "reference_to_policy"]
KlPlacement = Literal["loss", "reward"]
ImportanceLevel = Literal["none", "token", "sequence"]
ImportanceMode = Literal["truncate", "mask"]
DataOrder = Literal["shuffled", "sequential"]
OldLogprobs = Literal["sampler", "trainer"]
ScheduleAdvances = Literal["update", "rollout"]
LoggedStd = Literal["batch", "group"]
LoggedUpdates = Literal["mean", "last"]
LoggedLength = Literal["all", "sampled"]
Unscored = Literal["error", "exclude", "zero"]
BestAtK = Literal["subsets", "resampled"]
VoteTie = Literal["first", "shared"]
OverallScore = Literal["items", "datasets"]
TokenAggregation = Literal["token_mean", "sequence_mean", "sequence_mean_nonempty", "token_sum"]
Divergence = Literal["forward_kl", "reverse_kl", "jsd", "mixed_kl"]
PreferenceKind = Literal["sigmoid", "hinge", "ipo"]
BaselineWeighting = Literal["rows", "tokens"]
TokenCredit = Literal["outcome", "returns", "turn_returns", "gae"]
Whitening = Literal["none", "mean_std", "mean", "std"]
WhiteningSingleton = Literal["undivided", "unwhitened", "nan"]
BufferOrder = Literal["oldest_first", "newest_first"]
BufferFull = Literal["refuse", "drop_oldest"]
AnswerTaken = Literal["last", "first"]
LongPrompt = Literal["drop", "left", "right", "raise"]
EqualPrompts = Literal["keep", "drop"]
PromptStyle = Literal["template", "raw"]
Decayed = Literal["all", "matrices"]

PIECES = ("advantage_baseline", "objective", "aggregation", "kl_estimator", "importance_mode")
"""The fields that also take "custom" or a function."""


@dataclass(frozen=True, slots=True)
class Conventions:
    """The choices of one implementation. The defaults are those of the GRPO paper (arXiv 2402.03300).

    Five fields also take what has no name here. "custom" says that the piece is none of the words: checks that would compare
    it leave it out, and those judge it that hold for every implementation. A function of its own, which a module has at its
    top level, is what it is compared with.

    Attributes:
        advantage_baseline: the baseline subtracted from a reward: the mean of its group, the mean of the others in the
            group ("leave_one_out", RLOO), or nothing. A function gets the rewards of a group, [G], and returns the
            baseline, a scalar or [G].
        advantage_scale: the divisor of the centred reward: the standard deviation of its group, of the whole batch,
            or nothing (Dr. GRPO).
        advantage_std_of_others: with the leave-one-out baseline the group's standard deviation is that of the others, not
            that of the whole group.
        advantage_ddof: 0 divides the sum of squares by n, 1 by n - 1.
        advantage_eps: the small constant that keeps the division finite.
        advantage_eps_mode: "add" divides by std + eps, "clamp" by max(std, eps), "skip" divides by std + eps where
            std > 0 and leaves the centred reward as it is elsewhere.
        singleton_group: the advantage of a prompt with one completion: zero, its reward as it is, or NaN.
        nan_reward: a NaN reward is an error (the call raises, or the row's advantage is NaN), or it is left out of the
            statistics and gets advantage zero.
        reward_clip: rewards are clipped to ± this before anything else; None is off.
        overlong_buffer: a completion loses reward for each token by which it is longer than the limit less this many tokens
            (DAPO, 2503.14476, eq. 13). None is off.
        overlong_penalty: what it has lost at the limit.
        mask_truncated: no token of a completion that ended at its limit is trained (DAPO's overlong filtering); its reward
            counts in the statistics.
        objective: "clip" is PPO's min(rA, clip(r)A); "cispo" is the detached, clipped ratio times A times the logprob
            (arXiv 2506.13585); "reinforce" is A times the logprob, without a ratio; "gmpo" is A times the geometric mean
            of the row's ratios, each clipped as in "clip" (2507.20673); "sapo" is A times the soft gate
            4/τ · sigmoid(τ(r - 1)), without a clip (2511.20347). A function gets logprobs, old logprobs, advantages and
            mask, each [B, T], and returns the losses of the tokens, [B, T], from which clip_low, clip_high and dual_clip
            are absent.
        sapo_temperature_positive: the τ of "sapo" where A > 0.
        sapo_temperature_negative: the τ elsewhere.
        off_policy_mask: a row with a negative advantage whose mean of old minus present logprobs is above this has no policy
            loss, while its tokens still count in the aggregation (DeepSeek-V3.2). With a correction for the sampler its
            logprobs stand in the place of the old ones. None is off.
        ratio_level: one importance ratio per token, or one per sequence: exp of the mean log-ratio (GSPO, 2507.18071).
        clip_low: the ratio is clipped below at 1 - clip_low; None leaves it unclipped.
        clip_high: the ratio is clipped above at 1 + clip_high; None leaves it unclipped.
        clip_bounds: "fixed" are those of clip_low and clip_high. "dynamic" (DCPO, 2509.02333) leaves rare tokens more room:
            with q the old probability of the token the bounds are (1 + sqrt(1 + 4 clip_high / q)) / 2 and
            (1 + sqrt(max(1 - 4 clip_low / q, 0))) / 2.
        dual_clip: the loss of "clip" is at most dual_clip times -A where A < 0 (arXiv 1912.09729, eq. 5); None is off.
        log_ratio_clamp: the log-ratio is clamped to ± this before exp; None is off.
        aggregation: the reduction of token losses to one number. "token_mean" divides their sum by the number of
            tokens, "sequence_mean" averages each row's mean over all rows and "sequence_mean_nonempty" over the rows
            that have a token, "sequence_sum" and "sequence_sum_nonempty" do the same with each row's sum, "constant"
            divides the sum by rows × aggregation_constant (Dr. GRPO, 2503.20783), "group_token_mean" averages the token
            means of the groups. A function gets values and mask, both [B, T], and returns a scalar.
        aggregation_constant: the C of "constant", in tokens.
        top_entropy: the policy loss and the entropy bonus are of the tokens whose entropy is at least the 1 - top_entropy
            quantile of all trained tokens', over all ranks (2506.01939). The others count in the aggregation of the policy
            loss, and not in that of the bonus. None is off.
        kl_aggregation: the reduction of the KL term, if another.
        entropy_aggregation: the reduction of the entropy bonus, if another.
        kl_estimator: k1 = log(p/q), k2 = its square / 2, k3 = q/p - 1 - log(q/p), abs = |log(p/q)|
            (Schulman, "Approximating KL divergence"). A function gets log(p/q), [B, T], and returns the estimates.
        kl_direction: which of KL(policy ‖ reference) and KL(reference ‖ policy) the estimator's p and q stand for.
        kl_coef: beta, the coefficient of the KL.
        kl_placement: the KL is a term of the loss, or is subtracted from the reward.
        kl_input_clamp: the log-ratio is clamped to ± this first; a token beyond it has no gradient. None is off.
        kl_output_clamp: the estimate is clamped to ± this; a token beyond it has no gradient. None is off.
        kl_score_term: the loss term also carries the score-function part, estimate × ∇logprob, so that on policy its
            gradient is that of the expected estimate. For k1 and k3 of KL(policy ‖ reference) that is the true KL of each
            token given its prefix. k2 has the true KL's gradient without this term, and another one with it.
        kl_ratio_weighted: each token's KL in the loss is multiplied by the token's own importance ratio, at any ratio_level
            (DeepSeek-V3.2), before kl_output_clamp. On policy this does to the gradient what kl_score_term does, which
            therefore excludes it.
        entropy_coef: the entropy bonus is this times the aggregated entropy, subtracted from the loss.
        logprobs_upcast: logprobs are float32 for logits of any dtype; otherwise they have the logits' dtype.
        temperature: the temperature at which a training step samples and scores completions.
        old_logprobs: the denominator of a training step's importance ratio: the logprobs that came with the batch
            from the sampler, or those that the trainer itself computes before the update.
        training_dropout: the forward pass of an update keeps the model's dropout on. Scoring never does, so that with it
            the ratio is not 1 on policy.
        max_grad_norm: the gradient of an update is scaled down to this norm; None leaves it.
        importance_level: the correction for a sampler that is not the trainer: none, per token, or per sequence.
        importance_mode: weights above importance_high are truncated to it, or weights outside
            [importance_low, importance_high] are set to zero. A function gets the weights, [B, T], and returns others.
        importance_low: the lower bound of "mask".
        importance_high: the upper bound.
        evaluation_temperature: the temperature at which an evaluation samples; 0 is greedy.
        engine_tolerance: the largest difference, in nats, between the engine's logprobs and the trainer's on the tiny models
            of the checks, for an engine in lower precision than the trainer: 0.5 for bfloat16. 0 allows for rounding in
            the trainer's precision. An engine of weights in eight bits is checked in bfloat16, or by `sync.small_weights`
            alone: on models as tiny as these its roundings hide much else.
        sync_while_sampling: weights may be synced while requests are under way; completions straddle two versions then.
        data_order: every epoch has an order of its own, or all epochs go through the items from first to last.
        epochs_per_rollout: the passes of an RL step over its rollout batch.
        mini_batches: the updates of such a pass, each on its share of the completions.
        schedule_advances: the learning-rate schedule is stepped after each update, or once after all updates on a rollout
            batch.
        approx_kl_estimator: the estimator of the logged KL(old policy ‖ policy): k1 = log(old/new), k2 = its square / 2,
            k3 = new/old - 1 + log(old/new).
        logged_updates: the metrics of an RL step are the mean over its updates, those of the last one, or all of them one or
            the other (None).
        logged_std: the logged standard deviation of rewards is that of all completions, or the mean of the groups' own.
        logged_std_ddof: 0 or 1, as `advantage_ddof`.
        logged_length: a completion's logged length counts all its tokens, or those that the policy sampled.
        length_counts_eos: that length counts the end-of-sequence id which ends a completion.
        unscored: a completion with a NaN reward makes the logged numbers an error (the call raises, or the number is NaN),
            is left out of them, or counts as 0.
        pass_threshold: a completion is right if its reward or score is at least this.
        best_at_k: best@k is the mean of the best over all subsets of k samples, or over draws of k samples with
            replacement, which may be estimated from 1000 draws or more.
        vote_tie: between answers with equally many votes the one that was sampled first wins, or the score is the mean of
            theirs.
        overall_score: an evaluation's number over several datasets is the mean over items, or over datasets.
        supervised_aggregation: the reduction of the cross entropies of labels. The means are those of `aggregation`;
            "token_sum" is the plain sum.
        supervised_label_smoothing: the share of each label's probability that is spread evenly over the vocabulary.
        distillation_divergence: KL(teacher ‖ student) ("forward_kl"), KL(student ‖ teacher) ("reverse_kl"), the generalised
            Jensen-Shannon divergence beta KL(teacher ‖ m) + (1 - beta) KL(student ‖ m) with m = beta teacher + (1 - beta)
            student ("jsd", GKD, arXiv 2306.13649), or beta forward + (1 - beta) reverse KL ("mixed_kl").
        distillation_beta: the beta of "jsd" and "mixed_kl", the weight of the teacher's term.
        distillation_temperature_squared: the divergence is multiplied by the square of the temperature (Hinton, 1503.02531),
            which keeps the size of its gradient.
        distillation_label_weight: the weight w of the cross entropy of the completion's own ids, at temperature 1; the
            divergence has the weight 1 - w.
        distillation_aggregation: the reduction of token losses, as supervised_aggregation.
        distillation_whole_rows: the teacher scores every position, as a model does. False where it scores trained tokens
            alone, as a server may, and its logits are -inf or NaN elsewhere.
        preference_kind: the loss of a margin z = beta × (log-ratio of chosen - log-ratio of rejected) - preference_margin:
            -log sigmoid(z) (DPO, 2305.18290, eq. 7), max(0, 1 - z) (SLiC, 2305.10425), or the squared distance of that
            difference of log-ratios from 1 / (2 beta) (IPO, 2310.12036, eq. 17).
        preference_beta: beta, the scale of rewards.
        preference_reference: log-ratios are taken against a reference model; without one they are logprobs (SimPO).
        preference_length_normalised: a completion's logprob is the mean over its tokens (SimPO, 2405.14734), not the sum.
        preference_margin: the margin gamma by which the chosen reward has to win, of "sigmoid" and "hinge".
        preference_label_smoothing: the share of pairs whose labels are taken to be swapped, of "sigmoid" (cDPO).
        preference_supervised_coef: the coefficient of the negative logprob of the chosen tokens, added to the loss (RPO,
            2404.19733) and reduced by supervised_aggregation.
        token_credit: the advantage of a token. "outcome": that of its row, whose reward is the sum of all its rewards.
            "returns": the sum of its own and all later rewards, discounted per token, where the row's reward, relative to
            the baseline and on the scale of `advantage_*`, falls on the last trained token (REINFORCE++, 2501.03262).
            "turn_returns": the same per turn, whose tokens share the sum of the turn's rewards and of later turns',
            discounted per turn (Kevin, 2507.11948). "gae": generalised advantage estimation against a critic (1506.02438)
            of the rewards as they are, without the fields `advantage_*`. Steps are trained tokens; those of tools are
            part of the next state.
        baseline_weighting: in the mean of its group, where that is the baseline, each row counts alike, or by its trained
            tokens (OPO, 2505.23585). `advantages` is told no lengths: there rows count alike.
        discount: gamma, of "returns", "turn_returns" and "gae".
        gae_lambda: lambda of "gae".
        critic_lambda: the lambda of the returns that the critic is trained towards, if another (VC-PPO, 2503.01491); None
            is gae_lambda.
        whitening: token advantages, of all trained tokens of the batch, are centred and divided by their standard
            deviation ("mean_std"), only centred, only divided, or left. The critic's returns are those before it.
        whitening_ddof: 0 divides the sum of squares of the standard deviation by n, 1 by n - 1.
        whitening_singleton: where that leaves no deviation to divide by, of one trained token with n - 1, its advantage is
            only centred if that is declared ("undivided"), left as it is ("unwhitened"), or NaN.
        value_clip: the value of a token is clipped to ± this around the old one, and the larger squared error counts; None
            is off.
        value_aggregation: the reduction of squared errors to one number, as `aggregation` for the policy.
        value_coef: the coefficient of the squared error in the value loss.
        buffer_order: the groups of a buffer that are trained next are those that were put first ("oldest_first"), those
            that were put last ("newest_first"), or any of them (None).
        buffer_full: a full buffer takes no group until there is room ("refuse"), or throws out the group that was put
            first for each new one ("drop_oldest").
        sync_buffers: training changes buffers of the model, such as the bias of a router, and a weight sync sends them
            with the parameters. False where all buffers are constant.
        sync_frozen: a weight sync sends frozen parameters too, so that the engine may hold any weights before. False where
            the engine has loaded them from the checkpoint and gets what is trained, such as adapters (LoRA).
        answer_taken: the final answer of a completion that gives several in the format that a verifier reads.
        prompt_style: the prompt of a row is its conversation in the tokenizer's chat template ("template"), the text of its
            only message with the tokenizer's own special tokens ("raw"), or written in another way (None).
        long_prompt: a row whose prompt is longer than the limit is dropped, loses its first tokens ("left") or its last
            ones ("right") until it is as long as the limit, or is an error.
        equal_prompts: of the rows with the same prompt and reference all are kept, or only the first.
        decayed: weight decay is of all trained parameters, or of those with two dimensions or more: no norms, no biases.
    """

    advantage_baseline: Baseline | Custom = "mean"
    advantage_scale: Scale = "group"
    advantage_std_of_others: bool = True
    advantage_ddof: int = 1
    advantage_eps: float = 1e-6
    advantage_eps_mode: EpsMode = "add"
    singleton_group: SingletonGroup = "zero"
    nan_reward: NanReward = "raise"
    reward_clip: float | None = None
    overlong_buffer: int | None = None
    overlong_penalty: float = 1.0
    mask_truncated: bool = False

    objective: Objective | Custom = "clip"
    sapo_temperature_positive: float = 1.0
    sapo_temperature_negative: float = 1.05
    off_policy_mask: float | None = None
    ratio_level: RatioLevel = "token"
    clip_low: float | None = 0.2
    clip_high: float | None = 0.2
    clip_bounds: ClipBounds = "fixed"
    dual_clip: float | None = None
    log_ratio_clamp: float | None = None
    aggregation: Aggregation | Custom = "sequence_mean"
    aggregation_constant: float = 1.0
    top_entropy: float | None = None
    kl_aggregation: Aggregation | None = None
    entropy_aggregation: Aggregation | None = None

    kl_estimator: KlEstimator | Custom = "k3"
    kl_direction: KlDirection = "policy_to_reference"
    kl_coef: float = 0.0
    kl_placement: KlPlacement = "loss"
    kl_input_clamp: float | None = None
    kl_output_clamp: float | None = None
    kl_score_term: bool = False
    kl_ratio_weighted: bool = False
    entropy_coef: float = 0.0

    logprobs_upcast: bool = True
    temperature: float = 1.0
    old_logprobs: OldLogprobs = "sampler"
    training_dropout: bool = False
    max_grad_norm: float | None = None

    importance_level: ImportanceLevel = "none"
    importance_mode: ImportanceMode | Custom = "truncate"
    importance_low: float = 0.0
    importance_high: float = 2.0

    evaluation_temperature: float = 0.0
    engine_tolerance: float = 0.0
    sync_while_sampling: bool = True
    data_order: DataOrder = "shuffled"

    epochs_per_rollout: int = 1
    mini_batches: int = 1
    schedule_advances: ScheduleAdvances = "update"

    approx_kl_estimator: ApproxKlEstimator = "k1"
    logged_updates: LoggedUpdates | None = None
    logged_std: LoggedStd = "batch"
    logged_std_ddof: int = 1
    logged_length: LoggedLength = "all"
    length_counts_eos: bool = True
    unscored: Unscored = "error"
    pass_threshold: float = 1.0
    best_at_k: BestAtK = "subsets"
    vote_tie: VoteTie = "first"
    overall_score: OverallScore = "items"

    supervised_aggregation: TokenAggregation = "token_mean"
    supervised_label_smoothing: float = 0.0
    distillation_divergence: Divergence = "reverse_kl"
    distillation_beta: float = 0.5
    distillation_temperature_squared: bool = False
    distillation_label_weight: float = 0.0
    distillation_aggregation: TokenAggregation = "token_mean"
    distillation_whole_rows: bool = True
    preference_kind: PreferenceKind = "sigmoid"
    preference_beta: float = 0.1
    preference_reference: bool = True
    preference_length_normalised: bool = False
    preference_margin: float = 0.0
    preference_label_smoothing: float = 0.0
    preference_supervised_coef: float = 0.0

    token_credit: TokenCredit = "outcome"
    baseline_weighting: BaselineWeighting = "rows"
    discount: float = 1.0
    gae_lambda: float = 0.95
    critic_lambda: float | None = None
    whitening: Whitening = "none"
    whitening_ddof: int = 1
    whitening_singleton: WhiteningSingleton = "undivided"
    value_clip: float | None = None
    value_aggregation: Aggregation = "token_mean"
    value_coef: float = 0.5

    buffer_order: BufferOrder | None = "oldest_first"
    buffer_full: BufferFull = "refuse"
    sync_buffers: bool = False
    sync_frozen: bool = True

    answer_taken: AnswerTaken = "last"
    prompt_style: PromptStyle | None = "template"
    long_prompt: LongPrompt = "drop"
    equal_prompts: EqualPrompts = "keep"

    decayed: Decayed = "all"

    def __post_init__(self) -> None:
        for field in fields(self):
            value, allowed = getattr(self, field.name), choices(field.name)
            if allowed and value not in allowed and not (field.name in PIECES and self.is_own(field.name)):
                custom = ", 'custom' or a function" if field.name in PIECES else ""
                raise ValueError(f"{field.name}={value!r} is not one of {', '.join(map(repr, allowed))}{custom}")
            if wrong := out_of_range(field.name, value):
                raise ValueError(wrong)
        for name, others in {
            **dict.fromkeys(("kl_aggregation", "entropy_aggregation"), Aggregation),
            "buffer_order": BufferOrder,
            "prompt_style": PromptStyle,
            "logged_updates": LoggedUpdates,
        }.items():
            if (value := getattr(self, name)) not in (*get_args(others), None):
                raise ValueError(
                    f"{name}={value!r} is neither None nor one of {', '.join(map(repr, get_args(others)))}"
                )
        if (low := self.importance_low) > self.importance_high:
            raise ValueError(f"importance_low={low!r} is above importance_high={self.importance_high!r}")
        if self.kl_score_term and self.kl_ratio_weighted:
            raise ValueError(
                "kl_score_term and kl_ratio_weighted together count the gradient of the importance ratio twice: set one"
            )

    def is_own(self, name: str) -> bool:
        """Tell whether a piece is "custom" or a function."""
        value = getattr(self, name)
        return value == "custom" or callable(value)

    def replace(self, **changes: Any) -> Self:
        """A copy with some choices changed.

        Raises:
            TypeError: a name is not a convention.
            ValueError: a value is not one that the convention can take.
        """
        return replace(self, **changes)


@cache
def choices(name: str) -> tuple[str, ...]:
    """Return the words that a field can take, without "custom"; none for a field of another type."""
    allowed = get_args(get_type_hints(Conventions)[name])
    # A program that runs without rlcanary has no annotations.
    words = get_args(allowed[0]) if allowed and name in PIECES else allowed
    return words if words and isinstance(words[0], str) else ()
