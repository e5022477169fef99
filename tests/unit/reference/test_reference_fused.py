"""Logprobs from hidden states and a head, against the logits that they never make."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_compute_logprobs import LargestTensor

from rlcanary.reference import entropy, fused_linear_logprobs, fused_linear_logprobs_and_entropy, token_logprobs

few = settings(max_examples=20, derandomize=True, deadline=None)


def inputs(*shape, features=8, vocabulary=37, dtype=torch.float64, seed=0):
    rng = torch.Generator().manual_seed(seed)
    hidden = torch.randn(*shape, features, generator=rng, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(vocabulary, features, generator=rng, dtype=torch.float64).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(vocabulary, shape, generator=rng)


def exact(hidden, weight, ids, temperature=1.0):
    """Logprobs, entropies and, for given upstream gradients, the gradients, in float64 by autograd."""
    leaves = hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    logits = leaves[0] @ leaves[1].t()
    return leaves, token_logprobs(logits, ids, temperature), entropy(logits, temperature)


def total(logprobs, entropies):
    """A scalar in which every token has another weight."""
    weights = torch.linspace(-1, 2, logprobs.numel(), dtype=torch.float64).view(logprobs.shape)
    return (logprobs * weights).sum() + (entropies * weights.flip(0)).sum()


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("chunk", [None, 1, 5, 36, 37, 1000])
def test_values_and_gradients_equal_autograd_in_float64(chunk, temperature):
    hidden, weight, ids = inputs(3, 5)
    got = fused_linear_logprobs_and_entropy(hidden, weight, ids, temperature, chunk)
    leaves, logprobs, entropies = exact(hidden, weight, ids, temperature)
    torch.testing.assert_close(got.logprobs, logprobs)
    torch.testing.assert_close(got.entropy, entropies)
    gradients = torch.autograd.grad(total(*got), (hidden, weight))
    torch.testing.assert_close(gradients, torch.autograd.grad(total(logprobs, entropies), leaves))


@pytest.mark.parametrize("chunk", [None, 5])
def test_without_entropy_the_logprobs_and_their_gradients_are_the_same(chunk):
    hidden, weight, ids = inputs(3, 5)
    got = fused_linear_logprobs(hidden, weight, ids, 0.6, chunk)
    both = fused_linear_logprobs_and_entropy(hidden, weight, ids, 0.6, chunk).logprobs
    assert torch.equal(got, both)
    upstream = torch.randn(3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(
        torch.autograd.grad(got, (hidden, weight), upstream), torch.autograd.grad(both, (hidden, weight), upstream)
    )


def test_gradients_are_slopes():
    hidden, weight, ids = inputs(2, 2, features=3, vocabulary=5)
    assert torch.autograd.gradcheck(lambda h, w: fused_linear_logprobs_and_entropy(h, w, ids, 0.7, 2), (hidden, weight))


def test_float32_is_within_rounding_of_float64():
    hidden, weight, ids = inputs(4, 16, features=64, vocabulary=3000, dtype=torch.float32)
    got = fused_linear_logprobs_and_entropy(hidden, weight, ids, chunk=100)
    leaves, logprobs, entropies = exact(hidden, weight, ids)
    assert got.logprobs.dtype == got.entropy.dtype == torch.float32
    torch.testing.assert_close(got.logprobs.double(), logprobs, rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(got.entropy.double(), entropies, rtol=1e-6, atol=1e-5)
    gradients = torch.autograd.grad(total(*got), (hidden, weight))
    for gradient, expected in zip(gradients, torch.autograd.grad(total(logprobs, entropies), leaves), strict=True):
        torch.testing.assert_close(gradient.double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_equals_the_logits_of_a_head_in_that_precision(dtype):
    """The head's product is rounded, as in a model; everything behind it is float32."""
    hidden, weight, ids = inputs(4, 16, features=32, vocabulary=500, dtype=dtype)
    got = fused_linear_logprobs_and_entropy(hidden, weight, ids, 0.8, chunk=64)
    logits = (hidden @ weight.t()).detach()
    torch.testing.assert_close(got.logprobs, token_logprobs(logits, ids, 0.8), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got.entropy, entropy(logits, 0.8), rtol=1e-5, atol=1e-5)


def test_bfloat16_gradients_do_not_lose_digits_over_tiles():
    """Sums over 512 tiles of one column each: as close to float64 as the plain path in bfloat16 is."""
    hidden, weight, ids = inputs(2, 64, features=32, vocabulary=512, dtype=torch.bfloat16)
    leaves, logprobs, entropies = exact(hidden, weight, ids)
    expected = torch.autograd.grad(total(logprobs, entropies * 0), leaves)
    fused = fused_linear_logprobs(hidden, weight, ids, chunk=1)
    plain = token_logprobs(hidden @ weight.t(), ids)

    def errors(scores):
        gradients = torch.autograd.grad(total(scores, scores * 0), (hidden, weight))
        return [
            float((gradient.double() - truth).norm() / truth.norm())
            for gradient, truth in zip(gradients, expected, strict=True)
        ]

    for error, bound in zip(errors(fused), errors(plain), strict=True):
        assert error < 1.2 * bound


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_second_backward_pass_gives_the_same_gradients(dtype):
    """The tiles that are kept for it are read and not used up."""
    hidden, weight, ids = inputs(3, 5, dtype=dtype)
    loss = total(*fused_linear_logprobs_and_entropy(hidden, weight, ids, 0.6, chunk=5))
    first = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
    second = torch.autograd.grad(loss, (hidden, weight))
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def test_no_tensor_of_the_logits_size_is_made_in_either_direction():
    hidden, weight, ids = inputs(4, 64, features=8, vocabulary=4000, dtype=torch.float32)
    with LargestTensor() as largest:
        total(*fused_linear_logprobs_and_entropy(hidden, weight, ids, chunk=100)).backward()
    assert largest.elements <= max(ids.numel() * 100, weight.numel())


def test_a_frozen_head_or_frozen_hidden_states_get_no_gradient():
    hidden, weight, ids = inputs(3, 5)
    expected = torch.autograd.grad(fused_linear_logprobs(hidden, weight, ids).sum(), (hidden, weight))
    only_hidden = fused_linear_logprobs(hidden, weight.detach(), ids).sum()
    only_weight = fused_linear_logprobs(hidden.detach(), weight, ids).sum()
    assert torch.equal(torch.autograd.grad(only_hidden, hidden)[0], expected[0])
    assert torch.equal(torch.autograd.grad(only_weight, weight)[0], expected[1])


def test_extreme_logits_do_not_overflow():
    hidden = torch.tensor([[1.0], [-1.0]], requires_grad=True)
    weight = torch.tensor([[3e4], [0.0], [-3e4], [2.9e4]], requires_grad=True)
    got = fused_linear_logprobs_and_entropy(hidden, weight, torch.tensor([0, 0]), chunk=1)
    assert got.logprobs.tolist() == pytest.approx([0.0, -6e4])
    assert got.entropy.tolist() == pytest.approx([0.0, 0.0])
    got.logprobs.sum().backward()
    assert hidden.grad.isfinite().all()
    assert weight.grad.isfinite().all()


@pytest.mark.parametrize("shape", [(7,), (2, 3, 4), (0,), (2, 0)])
def test_any_leading_dimensions_will_do(shape):
    hidden, weight, ids = inputs(*shape)
    got = fused_linear_logprobs(hidden, weight, ids)
    assert got.shape == ids.shape
    got.sum().backward()
    assert hidden.grad.shape == hidden.shape


def test_only_the_trained_tokens_can_be_given():
    hidden, weight, ids = inputs(3, 5)
    mask = torch.arange(5) < torch.tensor([[5], [0], [2]])
    got = fused_linear_logprobs(hidden[mask], weight, ids[mask])
    torch.testing.assert_close(got, fused_linear_logprobs(hidden, weight, ids)[mask])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_BTD": torch.zeros(3, 5, 7)}, "do not fit a head"),
        ({"hidden_BTD": torch.zeros(3, 5, 8)}, "do not fit a head"),
        ({"weight_VD": torch.zeros(8, dtype=torch.float64)}, "do not fit a head"),
        ({"ids_BT": torch.zeros(3, 4, dtype=torch.long)}, "one to one"),
        ({"ids_BT": torch.full((3, 5), 37)}, "id 37 is outside"),
        ({"ids_BT": torch.full((3, 5), -100)}, "id -100 is outside"),
        ({"temperature": 0.0}, "temperature=0.0"),
        ({"temperature": math.nan}, "temperature=nan"),
        ({"chunk": 0}, "chunk=0 has to be at least 1"),
    ],
)
def test_what_does_not_fit_is_an_error(change, message):
    hidden, weight, ids = inputs(3, 5)
    with pytest.raises(ValueError, match=message):
        fused_linear_logprobs(**{"hidden_BTD": hidden, "weight_VD": weight, "ids_BT": ids, **change})


@few
@given(
    rows=st.integers(1, 4),
    width=st.integers(1, 5),
    vocabulary=st.integers(1, 12),
    chunk=st.integers(1, 14),
    temperature=st.sampled_from([0.5, 1.0, 2.0]),
    seed=st.integers(0, 99),
)
def test_every_chunk_gives_the_scores_of_the_logits(rows, width, vocabulary, chunk, temperature, seed):
    hidden, weight, ids = inputs(rows, width, features=3, vocabulary=vocabulary, seed=seed)
    got = fused_linear_logprobs_and_entropy(hidden, weight, ids, temperature, chunk)
    leaves, logprobs, entropies = exact(hidden, weight, ids, temperature)
    torch.testing.assert_close((got.logprobs, got.entropy), (logprobs, entropies))
    torch.testing.assert_close(
        torch.autograd.grad(total(*got), (hidden, weight)),
        torch.autograd.grad(total(logprobs, entropies), leaves),
    )
