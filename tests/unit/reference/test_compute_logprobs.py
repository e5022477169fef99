"""Logprobs and entropies from logits, and the whole path from a model to the logprobs of its completions."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from rlcanary.contract.batch import Completion, Group, PolicyBatch
from rlcanary.contract.presets import PAPERS
from rlcanary.reference import (
    advantages,
    completion_logprobs,
    completion_scores,
    entropy,
    make_batch,
    packed_logprobs,
    policy_loss,
    token_logprobs,
)
from rlcanary.tiny_models import tiny_llama

few = settings(max_examples=25, derandomize=True, deadline=None)
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def random_logits(*shape, seed=0, scale=3.0):
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def random_ids(*shape, vocabulary, seed=1):
    return torch.randint(vocabulary, shape, generator=torch.Generator().manual_seed(seed))


def exact(logits, ids, temperature=1.0):
    """Logprobs and entropies in float64, by the textbook."""
    log_softmax = (logits.double() / temperature).log_softmax(dim=-1)
    return log_softmax.gather(-1, ids.unsqueeze(-1)).squeeze(-1), -(log_softmax.exp() * log_softmax).sum(dim=-1)


def test_manual_computation():
    logits = torch.tensor([[[0.0, math.log(2.0), math.log(5.0)], [1.0, 1.0, 1.0]]])
    got = token_logprobs(logits, torch.tensor([[2, 0]]))
    assert got.flatten().tolist() == pytest.approx([math.log(5 / 8), math.log(1 / 3)])
    expected = -sum(p * math.log(p) for p in (1 / 8, 2 / 8, 5 / 8))
    assert entropy(logits).flatten().tolist() == pytest.approx([expected, math.log(3)])


def test_temperature_divides_the_logits():
    logits = torch.tensor([[[0.0, 1.0]]])
    got = token_logprobs(logits, torch.tensor([[1]]), temperature=0.5)
    assert got.item() == pytest.approx(-math.log(1 + math.exp(-2)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
@pytest.mark.parametrize("shape", [(3, 5, 7), (2, 20, 30_000), (40, 1, 30_000), (6, 7), (2, 3, 4, 5)])
def test_any_float_dtype_gives_float32_within_1e_5_of_float64(dtype, temperature, shape):
    logits, ids = random_logits(*shape).to(dtype), random_ids(*shape[:-1], vocabulary=shape[-1])
    logprobs, entropies = token_logprobs(logits, ids, temperature), entropy(logits, temperature)
    expected, expected_entropy = exact(logits, ids, temperature)
    assert logprobs.dtype == entropies.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert (logprobs - expected).abs().max() < 1e-5
    assert (entropies - expected_entropy).abs().max() < 1e-5


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_have_the_dtype_of_the_logits_and_are_exact_but_for_its_rounding(dtype):
    logits, ids = random_logits(3, 20, 900).to(dtype), random_ids(3, 20, vocabulary=900)
    weights = random_logits(2, 3, 20, seed=2)
    leaf, exact_leaf = logits.clone().requires_grad_(), logits.double().requires_grad_()
    scores = token_logprobs(leaf, ids, 0.7), entropy(leaf, 0.7)
    sum((score * weight).sum() for score, weight in zip(scores, weights, strict=True)).backward()
    sum((s * w).sum() for s, w in zip(exact(exact_leaf, ids, 0.7), weights, strict=True)).backward()
    assert leaf.grad.dtype == dtype
    # Two gradients are rounded and then added: a few units in the last place.
    tolerance = {torch.bfloat16: 2e-2, torch.float16: 3e-3}.get(dtype, 1e-5)
    torch.testing.assert_close(leaf.grad.double(), exact_leaf.grad, rtol=tolerance, atol=tolerance)


def test_gradients_are_slopes():
    logits, ids = random_logits(2, 3, 5).requires_grad_(), random_ids(2, 2, vocabulary=5)
    assert torch.autograd.gradcheck(lambda x: token_logprobs(x[:, :-1], ids, 0.7), logits)
    assert torch.autograd.gradcheck(lambda x: entropy(x[:, 1:], 0.7), logits)


class LargestTensor(TorchDispatchMode):
    """The number of elements of the largest tensor that an operation makes in memory of its own."""

    def __init__(self, *given):
        super().__init__()
        self.given = {tensor.untyped_storage().data_ptr() for tensor in given}
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        for tensor in output if isinstance(output, tuple | list) else [output]:
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in self.given:
                self.elements = max(self.elements, tensor.numel())
        return output


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("view", ["whole", "without the last position", "transposed"])
def test_forward_makes_no_second_tensor_of_the_logits_size(dtype, view):
    logits = random_logits(4, 601, 1000).to(dtype)
    seen = {"whole": logits, "without the last position": logits[:, :-1], "transposed": logits.transpose(0, 1)}[view]
    ids = random_ids(*seen.shape[:-1], vocabulary=1000)
    with LargestTensor(logits) as largest:
        token_logprobs(seen, ids, 0.8)
        entropy(seen)
    assert largest.elements <= logits.numel() / 4


def test_extreme_logits():
    logits = torch.tensor([[[1e4, 0.0, -1e4], [-3e38, 0.0, 3e38], [0.0, 0.0, -1e9]]])
    got = token_logprobs(logits, torch.tensor([[0, 2, 1]]))
    assert got.flatten().tolist() == pytest.approx([0.0, 0.0, -math.log(2)])
    assert token_logprobs(logits, torch.tensor([[1, 0, 2]])).flatten().tolist() == pytest.approx(
        [-1e4, -math.inf, -1e9]
    )
    assert entropy(logits).flatten().tolist() == pytest.approx([0.0, 0.0, math.log(2)])


def test_filtered_entries_count_for_nothing():
    """-inf as a top-k filter leaves it: kept entries are renormalised, a filtered id has logprob -inf, entropy is finite."""
    kept = random_logits(2, 3, 4)
    logits = torch.cat([kept, torch.full((2, 3, 2), -math.inf)], dim=-1).requires_grad_()
    ids = random_ids(2, 3, vocabulary=4)
    torch.testing.assert_close(token_logprobs(logits, ids), exact(kept, ids)[0])
    torch.testing.assert_close(entropy(logits), exact(kept, ids)[1])
    assert (token_logprobs(logits, torch.full((2, 3), 5)) == -math.inf).all()
    (token_logprobs(logits, ids).sum() + entropy(logits).sum()).backward()
    assert logits.grad.isfinite().all()
    assert not logits.grad[..., 4:].any()


def test_a_token_without_upstream_gradient_adds_none_even_where_its_logits_are_nan():
    logits = random_logits(1, 2, 4)
    logits[0, 1] = math.nan
    logits.requires_grad_()
    scores = token_logprobs(logits, torch.zeros(1, 2, dtype=torch.long)) + entropy(logits)
    (gradient,) = torch.autograd.grad(scores[0, 0], logits)
    assert gradient.isfinite().all()
    assert not gradient[0, 1].any()


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.nan, math.inf])
def test_a_temperature_that_is_no_positive_number_is_an_error(temperature):
    logits = torch.zeros(1, 1, 3)
    with pytest.raises(ValueError, match=r"temperature=.* above 0"):
        token_logprobs(logits, torch.zeros(1, 1, dtype=torch.long), temperature)
    with pytest.raises(ValueError, match=r"temperature=.* above 0"):
        entropy(logits, temperature)


@pytest.mark.parametrize("token", [-100, -1, 3])
def test_an_id_outside_the_vocabulary_is_an_error(token):
    with pytest.raises(ValueError, match=f"id {token} is outside the vocabulary of 3"):
        token_logprobs(torch.zeros(1, 2, 3), torch.tensor([[0, token]]))


@pytest.mark.parametrize("shape", [(2, 2), (2, 4), (3, 3), (2, 3, 1), ()])
def test_ids_have_to_fit_the_logits_one_to_one(shape):
    with pytest.raises(ValueError, match="one to one"):
        token_logprobs(torch.zeros(2, 3, 5), torch.zeros(shape, dtype=torch.long))


def test_ids_have_to_be_whole_numbers():
    with pytest.raises(ValueError, match=r"torch.float32 are no token ids"):
        token_logprobs(torch.zeros(1, 1, 3), torch.zeros(1, 1))
    assert token_logprobs(torch.zeros(1, 1, 3), torch.zeros(1, 1, dtype=torch.int32)).shape == (1, 1)


@pytest.mark.parametrize("shape", [(0, 3), (2, 0)])
def test_no_tokens_have_no_logprobs(shape):
    logits = torch.zeros(*shape, 5, requires_grad=True)
    got = token_logprobs(logits, torch.zeros(shape, dtype=torch.long))
    assert got.shape == entropy(logits).shape == shape
    got.sum().backward()
    assert logits.grad.shape == logits.shape


def test_inputs_are_left_as_they_were():
    logits, ids = random_logits(2, 3, 5).float(), random_ids(2, 3, vocabulary=5)
    before = logits.clone()
    token_logprobs(logits, ids, 0.5)
    entropy(logits, 0.5)
    assert torch.equal(logits, before)


@few
@given(seed=st.integers(0, 99), shift=st.floats(-50, 50), data=st.data())
def test_laws_of_logprobs(seed, shift, data):
    """Shifting a row changes nothing, renaming tokens renames them, rows do not see each other, probabilities add up."""
    logits, ids = random_logits(3, 2, 6, seed=seed), random_ids(3, 2, vocabulary=6, seed=seed)
    logprobs = token_logprobs(logits, ids)
    torch.testing.assert_close(token_logprobs(logits + shift, ids), logprobs)
    names = torch.tensor(data.draw(st.permutations(range(6))))
    torch.testing.assert_close(token_logprobs(logits[..., names], names.argsort()[ids]), logprobs)
    rows = torch.tensor(data.draw(st.permutations(range(3))))
    torch.testing.assert_close(token_logprobs(logits[rows], ids[rows]), logprobs[rows])
    every = torch.stack([token_logprobs(logits, torch.full((3, 2), token)) for token in range(6)])
    torch.testing.assert_close(every.exp().sum(dim=0), torch.ones(3, 2, dtype=torch.float64))
    torch.testing.assert_close(entropy(logits), -(every.exp() * every).sum(dim=0))


GROUPS = [
    Group([11, 12], [Completion([21, 22, 2]), Completion([23])], [1.0, 0.25]),
    Group([13, 14, 15, 16, 17], [Completion([24, 2]), Completion([0, 0, 0, 2])], [0.5, 0.75]),
    Group([18], [Completion([]), Completion([25, 26])], [0.0, 1.0]),
]
MIXED = [(group.prompt_ids, completion.token_ids) for group in GROUPS for completion in group.completions]


@pytest.fixture(scope="module")
def model():
    return tiny_llama(seed=3)


@pytest.fixture(params=["right", "left"])
def batch(request):
    return make_batch(GROUPS, pad_token_id=0, prompt_padding=request.param)[0]


def scored_alone(model, prompt, completion, temperature=1.0):
    """One sequence without padding: the logits at each position score the next token."""
    sequence = torch.tensor([[*prompt, *completion]])
    with torch.no_grad():
        log_softmax = (model(input_ids=sequence).logits[0].double() / temperature).log_softmax(dim=-1)
    return [log_softmax[len(prompt) - 1 + at, token].item() for at, token in enumerate(completion)]


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_mixed_prompt_lengths_are_scored_as_if_each_row_were_alone(model, batch, temperature):
    got = completion_logprobs(model, batch, temperature)
    assert got.dtype == torch.float32
    for row, (prompt, completion) in enumerate(MIXED):
        expected = scored_alone(model, prompt, completion, temperature)
        assert got[row, : len(completion)].tolist() == pytest.approx(expected, abs=1e-5)
    assert torch.equal(got.isnan(), ~batch.completion_mask)


def test_scores_of_a_pass_are_logprobs_and_entropies(model, batch):
    logprobs, entropies = completion_scores(model, batch, 0.8)
    torch.testing.assert_close(logprobs, completion_logprobs(model, batch, 0.8), equal_nan=True)
    logits = model(input_ids=torch.tensor([[11, 12, 21, 22, 2]])).logits[:, 1:4]
    torch.testing.assert_close(entropies[0, :3], entropy(logits, 0.8)[0], atol=1e-5, rtol=1e-5)


def test_rows_packed_into_one_sequence_score_the_same(model, batch):
    padded, packed = completion_logprobs(model, batch), packed_logprobs(model, batch)
    torch.testing.assert_close(packed, padded, equal_nan=True, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("offset", [-1, 1, 2])
def test_wrong_prompt_lengths_are_caught(model, batch, offset):
    with pytest.raises(ValueError, match=r"row \d"):
        completion_logprobs(model, replace(batch, completion_starts=batch.completion_starts + offset))


def test_one_wrong_prompt_length_among_right_ones_is_caught(model, batch):
    starts = batch.completion_starts.clone()
    starts[2] = 2
    with pytest.raises(ValueError, match="row 2 of input_ids"):
        completion_logprobs(model, replace(batch, completion_starts=starts))


def test_a_start_that_would_read_the_row_before_is_caught(model, batch):
    starts = batch.completion_starts.clone()
    starts[1] = 0
    with pytest.raises(ValueError, match=r"row 1 .*position 0 or before"):
        completion_logprobs(model, replace(batch, completion_starts=starts))


def test_a_start_that_would_read_the_next_row_is_caught(model, batch):
    starts = batch.completion_starts.clone()
    starts[0] = batch.input_ids.shape[1] - 2
    with pytest.raises(ValueError, match=r"row 0 .*the row's 9 positions"):
        completion_logprobs(model, replace(batch, completion_starts=starts))


def test_a_completion_that_is_not_attended_is_caught(model, batch):
    attended = batch.attention_mask.clone()
    attended[3, int(batch.completion_starts[3]) + 1] = False
    with pytest.raises(ValueError, match="attention mask of row 3"):
        completion_logprobs(model, replace(batch, attention_mask=attended))


def fixed(logits):
    return lambda **_: SimpleNamespace(logits=logits)


def test_only_the_logits_before_each_completion_token_are_read(batch):
    """NaN everywhere else, gradient included: no row reads its neighbour, its prompt or its padding."""
    rows, length = batch.input_ids.shape
    logits = torch.full((rows, length, 30), math.nan, dtype=torch.float64)
    for row, start in enumerate(batch.completion_starts.tolist()):
        count = int(batch.completion_mask[row].sum())
        logits[row, start - 1 : start - 1 + count] = random_logits(count, 30, seed=row)
    logits.requires_grad_()
    got = completion_logprobs(fixed(logits), batch)
    assert got[batch.completion_mask].isfinite().all()
    (gradient,) = torch.autograd.grad(got[batch.completion_mask].sum(), logits)
    assert gradient.isfinite().all()
    assert torch.equal(gradient.any(dim=-1), ~logits.isnan().any(dim=-1))


def test_holes_in_the_mask_get_no_gradient(batch):
    """Tool results inside a completion: scored by no one, trained by no one."""
    holey = replace(batch, completion_mask=batch.completion_mask & (torch.arange(batch.completion_mask.shape[1]) != 1))
    logits = random_logits(*batch.input_ids.shape, 30).requires_grad_()
    got = completion_logprobs(fixed(logits), holey)
    assert torch.equal(got.isnan(), ~holey.completion_mask)
    (gradient,) = torch.autograd.grad(got[holey.completion_mask].sum(), logits)
    assert int(gradient.any(dim=-1).sum()) == int(holey.completion_mask.sum())


def test_padding_ids_outside_the_vocabulary_do_not_matter():
    batch = make_batch(GROUPS, pad_token_id=-100)[0]
    got = completion_logprobs(fixed(random_logits(*batch.input_ids.shape, 30)), batch)
    assert torch.equal(got.isnan(), ~batch.completion_mask)


def test_a_sampled_id_outside_the_vocabulary_is_an_error(batch):
    with pytest.raises(ValueError, match="outside the vocabulary of 20"):
        completion_logprobs(fixed(random_logits(*batch.input_ids.shape, 20)), batch)


@pytest.mark.parametrize("name", PAPERS)
def test_grpo_shapes(model, batch, name):
    """From groups to a loss: one logprob per completion token, one advantage per row, one gradient per parameter."""
    logprobs = completion_logprobs(model, batch)
    given_advantages = advantages(batch.rewards, batch.group_ids, PAPERS[name])
    assert logprobs.shape == batch.completion_ids.shape == batch.completion_mask.shape == (6, 4)
    assert given_advantages.shape == batch.rewards.shape == batch.group_ids.shape == (6,)
    loss = policy_loss(
        PolicyBatch(logprobs, logprobs.detach(), given_advantages, batch.completion_mask, group_ids=batch.group_ids),
        PAPERS[name],
    ).loss
    assert loss.shape == ()
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert any(gradient.any() for gradient in gradients)
