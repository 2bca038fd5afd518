import jaxtyping
import pytest
import torch
from torch import Tensor

from asynctensorrlhf.bench.memory import LiveBytes
from asynctensorrlhf.policy.logprobs import scores_from_logits, token_logprobs

TEMPERATURES = pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
ENTROPY = pytest.mark.parametrize("entropy_gradient", [False, True])


def draw(*shape: int, scale: float = 2.0, num_ids: int | None = None) -> tuple[Tensor, Tensor]:
    """Logits of one position each, and an id for each."""
    generator = torch.Generator().manual_seed(0)
    logits = scale * torch.randn(shape, generator=generator)
    return logits, torch.randint(0, num_ids or shape[-1], shape[:-1], generator=generator)


def plain_scores(logits: Tensor, ids: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    distribution = torch.distributions.Categorical(logits=logits / temperature, validate_args=False)
    return distribution.log_prob(ids), distribution.entropy()


@TEMPERATURES
@ENTROPY
@pytest.mark.parametrize("chunk_tokens", [1, 4, 100])
def test_gradients_equal_finite_differences(temperature: float, entropy_gradient: bool, chunk_tokens: int) -> None:
    logits, ids = draw(2, 4, 9, num_ids=7)

    def scores(logits: Tensor) -> tuple[Tensor, ...]:
        logprobs, entropy = scores_from_logits(
            logits,
            ids,
            temperature=temperature,
            num_token_ids=7,
            chunk_tokens=chunk_tokens,
            entropy_gradient=entropy_gradient,
        )
        assert entropy.requires_grad == entropy_gradient
        return (logprobs, entropy) if entropy_gradient else (logprobs,)

    assert torch.autograd.gradcheck(scores, (logits.double().requires_grad_(),))


@TEMPERATURES
def test_bf16_logits_have_float32_scores_and_a_bf16_gradient(temperature: float) -> None:
    logits, ids = draw(64, 32000, scale=4.0)
    half = logits.bfloat16().requires_grad_()
    logprobs, entropy = scores_from_logits(
        half, ids, temperature=temperature, num_token_ids=32000, chunk_tokens=24, entropy_gradient=True
    )
    exact = half.detach().double().requires_grad_()
    expected = plain_scores(exact, ids, temperature)
    assert logprobs.dtype == entropy.dtype == torch.float32
    torch.testing.assert_close(logprobs.double(), expected[0], rtol=0, atol=1e-4)
    torch.testing.assert_close(entropy.double(), expected[1], rtol=0, atol=1e-4)

    (logprobs.sum() + 0.1 * entropy.sum()).backward()
    (expected[0].sum() + 0.1 * expected[1].sum()).backward()
    assert half.grad.dtype == torch.bfloat16
    # one rounding to 8 bits at the very end
    torch.testing.assert_close(half.grad.double(), exact.grad, rtol=2**-8, atol=1e-8)


@TEMPERATURES
def test_scores_are_those_of_token_logprobs_bit_for_bit(temperature: float) -> None:
    logits, ids = draw(3, 5, 50, num_ids=40)
    settings = {"temperature": temperature, "num_token_ids": 40}
    expected = token_logprobs(logits, ids, **settings)
    for chunk_tokens in (1, 4, 15, 100):
        assert torch.equal(scores_from_logits(logits, ids, **settings, chunk_tokens=chunk_tokens)[0], expected)


def test_columns_that_pad_the_vocabulary_have_no_influence_and_no_gradient() -> None:
    logits, ids = draw(6, 12, num_ids=9)
    poisoned = logits.clone()
    poisoned[:, 9:] = float("nan")
    poisoned.requires_grad_()
    logprobs, entropy = scores_from_logits(
        poisoned, ids, temperature=1.7, num_token_ids=9, chunk_tokens=4, entropy_gradient=True
    )
    expected = plain_scores(logits[:, :9], ids, 1.7)
    torch.testing.assert_close((logprobs, entropy), expected)
    (logprobs + entropy).sum().backward()
    assert not poisoned.grad[:, 9:].any()
    assert poisoned.grad[:, :9].all()


def test_a_forbidden_id_leaves_entropy_and_gradients_finite() -> None:
    logits, ids = draw(5, 8, num_ids=6)
    logits[:, 7] = float("-inf")
    logits.requires_grad_()
    logprobs, entropy = scores_from_logits(
        logits, ids, temperature=0.5, num_token_ids=8, chunk_tokens=2, entropy_gradient=True
    )
    (logprobs + 3 * entropy).sum().backward()
    assert entropy.isfinite().all()
    assert logits.grad.isfinite().all()
    assert not logits.grad[:, 7].any()


def test_not_a_number_is_not_hidden() -> None:
    logits, ids = draw(2, 8)
    logits[0, 3] = float("nan")
    logprobs, entropy = scores_from_logits(logits, ids, temperature=1.0, num_token_ids=8, chunk_tokens=8)
    assert logprobs.isnan().tolist() == entropy.isnan().tolist() == [True, False]


def test_no_tokens_have_no_scores() -> None:
    logits, ids = torch.zeros(0, 8, requires_grad=True), torch.zeros(0, dtype=torch.long)
    logprobs, entropy = scores_from_logits(logits, ids, temperature=1.0, num_token_ids=8, chunk_tokens=4)
    assert logprobs.shape == entropy.shape == (0,)
    logprobs.sum().backward()


@ENTROPY
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunk_tokens", [2, 8, 50])
def test_no_more_than_a_chunk_of_scores_is_ever_alive(
    dtype: torch.dtype, entropy_gradient: bool, chunk_tokens: int
) -> None:
    logits, ids = draw(200, 1000)
    logits = logits.to(dtype).requires_grad_()
    chunk_bytes, a_few_numbers_a_row = chunk_tokens * 1000 * 4, 200 * 8 * 6
    with LiveBytes(logits, ids) as live:
        logprobs, entropy = scores_from_logits(
            logits,
            ids,
            temperature=1.7,
            num_token_ids=1000,
            chunk_tokens=chunk_tokens,
            entropy_gradient=entropy_gradient,
        )
        assert 0 < live.peak <= chunk_bytes + a_few_numbers_a_row
        loss = logprobs.sum() + (entropy.sum() if entropy_gradient else 0)
        assert live.now <= a_few_numbers_a_row
        loss.backward()
    gradient_bytes = logits.numel() * logits.element_size()
    assert gradient_bytes < live.peak <= gradient_bytes + chunk_bytes + a_few_numbers_a_row


@ENTROPY
# torch's own tracer makes an instance of the function, and warns of it
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_it_compiles_without_a_graph_break(entropy_gradient: bool) -> None:
    logits, ids = draw(7, 12, num_ids=10)
    logits.requires_grad_()

    def loss(logits: Tensor) -> tuple[Tensor, Tensor]:
        logprobs, entropy = scores_from_logits(
            logits, ids, temperature=0.5, num_token_ids=10, chunk_tokens=5, entropy_gradient=entropy_gradient
        )
        return logprobs.square().sum() + entropy.sum(), entropy

    jaxtyping.config.update("jaxtyping_disable", True)  # the compiler can't trace shape checks
    try:
        value, entropy = torch.compile(loss, fullgraph=True, backend="aot_eager")(logits)
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)
    expected, _ = loss(logits)
    torch.testing.assert_close(value, expected)
    assert entropy.requires_grad == entropy_gradient
    torch.testing.assert_close(torch.autograd.grad(value, logits), torch.autograd.grad(expected, logits))
