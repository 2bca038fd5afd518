"""The trained model as a source of log-probabilities and weights.

Knows how to score completions with a gradient; does not know losses, rewards or when it is updated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional
from transformers import PreTrainedModel

from asynctensorrlhf.policy.backbone import Backbone
from asynctensorrlhf.policy.logprobs import logprobs_from_hidden
from asynctensorrlhf.policy.packing import PackedRows, pack
from asynctensorrlhf.policy.value_head import ValueHead
from asynctensorrlhf.types import TrainBatch


@dataclass(frozen=True)
class TokenScores:
    """What the policy thinks of sampled tokens; zero on padding.

    Attributes:
        logprobs: log pi_theta of each token, nats, float32; carries the gradient.
        entropy: of the distribution that each token was drawn from, nats; detached unless its gradient was asked for.
        values: the value head's estimate for the state before each token; carries its gradient. None without a head.
    """

    logprobs: Float[Tensor, "sample token"]
    entropy: Float[Tensor, "sample token"]
    values: Float[Tensor, "sample token"] | None = None


class Policy:
    """Scores completions under the current weights, without dropout, with or without a shared pass over prompts."""

    def __init__(
        self,
        *,
        model: PreTrainedModel,
        temperature: float,
        num_token_ids: int,
        share_prompt: bool,
        logprob_chunk_tokens: int,
        autocast: Callable[[], AbstractContextManager[None]],
        value_head: ValueHead | None = None,
    ) -> None:
        """Take `model` as the policy.

        Args:
            model: float32 weights; put in eval mode here and for good: dropout would make every ratio noise.
            temperature: of sampling, > 0.
            num_token_ids: ids that can be sampled; logits beyond them are left out.
            share_prompt: compute the prompt of a group once for all its samples.
            logprob_chunk_tokens: positions whose logits are held at once.
            autocast: makes the context of a forward pass, for a compute precision below float32.
            value_head: estimates returns from the model's hidden states; None: nobody asks for values.
        """
        self.model = model.eval()
        self.value_head = value_head
        self.share_prompt = share_prompt
        self._backbone = Backbone(model)
        self._temperature = temperature
        self._num_token_ids = num_token_ids
        self._chunk_tokens = logprob_chunk_tokens
        self._autocast = autocast

    def logprobs(self, batch: TrainBatch, *, entropy_gradient: bool = False) -> TokenScores:
        """Score every completion token of `batch`; padding may hold anything.

        Args:
            batch: on the model's device.
            entropy_gradient: whether the entropy carries a gradient; asking costs no second pass.
        """
        rows = pack(batch, share_prompt=self.share_prompt)
        with self._autocast():
            hidden = self._hidden(rows)
            logprobs, entropy = logprobs_from_hidden(
                hidden,
                self._backbone.head,
                rows.targets,
                temperature=self._temperature,
                num_token_ids=self._num_token_ids,
                chunk_tokens=self._chunk_tokens,
                entropy_gradient=entropy_gradient,
            )
        mask = batch.completion_mask
        values = None if self.value_head is None else _padded(self.value_head(hidden), mask)
        return TokenScores(_padded(logprobs, mask), _padded(entropy, mask), values)

    def state_values(self, batch: TrainBatch) -> Float[Tensor, "sample state"]:
        """The value head's estimates before each token and after the last one of `batch`; 0 beyond.

        Column `length` of a sample is the state that its last token led to, which a truncated sample goes on from.
        """
        assert self.value_head is not None, "values are asked of a policy with a value head"
        batch = _with_one_more_token(batch)
        with self._autocast():
            hidden = self._hidden(pack(batch, share_prompt=self.share_prompt))
        return _padded(self.value_head(hidden), batch.completion_mask)

    def logprobs_at(self, batch: TrainBatch, tensors: Mapping[str, Tensor]) -> Float[Tensor, "sample token"]:
        """Detached log-probs of `batch` under other weights of the same model; its own are neither copied nor changed.

        Args:
            batch: scored as `logprobs` scores it.
            tensors: every name of `named_tensors`, in any precision and on any device; tied weights follow.
        """
        own = self.named_tensors()
        assert tensors.keys() == own.keys(), "other weights have the names of the model's own, all of them"
        lent = {f"model.{name}": tensors[name].to(like.device, like.dtype) for name, like in own.items()}
        with torch.no_grad():
            scores: Tensor = functional_call(_Lent(self.model), lent, (lambda: self.logprobs(batch).logprobs,))
        return scores

    def _hidden(self, rows: PackedRows) -> Float[Tensor, "token hidden"]:
        hidden = self._backbone(rows.input_ids, position_ids=rows.position_ids, attention_mask=rows.attention_mask)
        return hidden.flatten(0, 1).index_select(0, rows.sources)

    def named_tensors(self) -> dict[str, Tensor]:
        """Weights and persistent buffers by name, tied ones once; detached, not copied."""
        once = dict(self.model.named_parameters()) | dict(self.model.named_buffers())
        return {name: tensor for name, tensor in self.model.state_dict().items() if name in once}


class _Lent(nn.Module):
    """Calls what reads the model, so that `functional_call` can lend the model other weights for that time."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, read: Callable[[], Tensor]) -> Tensor:
        return read()


def _padded(numbers: Float[Tensor, " number"], mask: Bool[Tensor, "sample column"]) -> Float[Tensor, "sample column"]:
    """One number for each True of the mask, row by row, and 0 elsewhere."""
    return numbers.new_zeros(mask.shape).masked_scatter(mask, numbers)


def _with_one_more_token(batch: TrainBatch) -> TrainBatch:
    """Every completion longer by a token that nobody sees: its place asks for the state after the last one."""
    padded = {
        name: functional.pad(getattr(batch, name), (0, 1))
        for name in ("completion_ids", "behaviour_logprobs", "token_versions", "advantages", "loss_mask")
    }
    return replace(batch, completion_lengths=batch.completion_lengths + 1, **padded)
