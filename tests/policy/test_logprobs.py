import pytest
import torch
from torch import Tensor, nn

from asynctensorrlhf.policy.logprobs import logprobs_from_hidden, token_logprobs


def test_bf16_logits_are_normalised_in_float32() -> None:
    logits = (4 * torch.randn(64, 32000, generator=torch.Generator().manual_seed(0))).to(torch.bfloat16)
    ids = torch.randint(0, 32000, (64,), generator=torch.Generator().manual_seed(1))
    actual = token_logprobs(logits, ids, temperature=1.0, num_token_ids=32000)
    expected = torch.log_softmax(logits.double(), dim=-1).gather(-1, ids[:, None]).squeeze(-1)
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual.double(), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_probabilities_of_the_legal_ids_sum_to_one(temperature: float) -> None:
    logits = torch.randn(3, 400, generator=torch.Generator().manual_seed(0))
    ids = torch.arange(258).expand(3, 258)
    logprobs = token_logprobs(logits[:, None].expand(3, 258, 400), ids, temperature=temperature, num_token_ids=258)
    torch.testing.assert_close(logprobs.exp().sum(1), torch.ones(3))


def test_temperature_divides_logits_and_not_logprobs() -> None:
    logits = torch.tensor([[2.0, 0.0]])
    actual = token_logprobs(logits, torch.tensor([0]), temperature=0.5, num_token_ids=2)
    torch.testing.assert_close(actual, torch.log(torch.sigmoid(torch.tensor([4.0]))))


class RecordingHead(nn.Linear):
    """Remembers how many positions it was asked for at once."""

    def __init__(self) -> None:
        super().__init__(8, 30)
        self.sizes: list[int] = []

    def forward(self, hidden: Tensor) -> Tensor:
        self.sizes.append(len(hidden))
        return super().forward(hidden)


def scores_and_gradients(chunk_tokens: int) -> tuple[RecordingHead, list[Tensor]]:
    torch.manual_seed(0)
    head, hidden, ids = RecordingHead(), torch.randn(20, 8, requires_grad=True), torch.randint(0, 25, (20,))
    logprobs, entropy = logprobs_from_hidden(
        hidden, head, ids, temperature=0.7, num_token_ids=25, chunk_tokens=chunk_tokens
    )
    (logprobs * torch.linspace(-1, 1, 20)).sum().backward()
    assert not entropy.requires_grad
    return head, [logprobs.detach(), entropy, hidden.grad, head.weight.grad, head.bias.grad]


@pytest.mark.parametrize("chunk_tokens", [1, 7, 19, 20])
def test_chunks_change_neither_values_nor_gradients(chunk_tokens: int) -> None:
    head, actual = scores_and_gradients(chunk_tokens)
    assert max(head.sizes) <= chunk_tokens
    _, expected = scores_and_gradients(10**6)
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_logits_of_no_chunk_outlive_it() -> None:
    kept: list[int] = []

    def note(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel())
        return tensor

    head, hidden, ids = nn.Linear(8, 5000), torch.randn(64, 8, requires_grad=True), torch.zeros(64).long()
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        logprobs_from_hidden(hidden, head, ids, temperature=1.0, num_token_ids=5000, chunk_tokens=8)
    # weight aside, nothing of the size of a chunk of logits is kept for the backward pass
    assert max(kept, default=0) < 8 * 5000


def test_a_forbidden_id_leaves_the_entropy_finite() -> None:
    head = nn.Linear(4, 6)
    head.bias.data[2] = float("-inf")
    _, entropy = logprobs_from_hidden(
        torch.randn(3, 4), head, torch.tensor([0, 1, 3]), temperature=1.0, num_token_ids=6, chunk_tokens=64
    )
    assert entropy.isfinite().all()
