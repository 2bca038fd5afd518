"""The trained model as a source of log-probabilities and weights.

Knows how to score completions with a gradient; does not know losses, rewards or when it is updated.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

from asynctensorrlhf.policy.backbone import Backbone
from asynctensorrlhf.policy.logprobs import logprobs_from_hidden
from asynctensorrlhf.policy.packing import pack
from asynctensorrlhf.types import TrainBatch


@dataclass(frozen=True)
class TokenScores:
    """What the policy thinks of sampled tokens; zero on padding.

    Attributes:
        logprobs: log pi_theta of each token, nats, float32; carries the gradient.
        entropy: of the distribution that each token was drawn from, nats, detached.
    """

    logprobs: Float[Tensor, "sample token"]
    entropy: Float[Tensor, "sample token"]


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
    ) -> None:
        """Take `model` as the policy.

        Args:
            model: float32 weights; put in eval mode here and for good: dropout would make every ratio noise.
            temperature: of sampling, > 0.
            num_token_ids: ids that can be sampled; logits beyond them are left out.
            share_prompt: compute the prompt of a group once for all its samples.
            logprob_chunk_tokens: positions whose logits are held at once.
            autocast: makes the context of a forward pass, for a compute precision below float32.
        """
        self.model = model.eval()
        self.share_prompt = share_prompt
        self._backbone = Backbone(model)
        self._temperature = temperature
        self._num_token_ids = num_token_ids
        self._chunk_tokens = logprob_chunk_tokens
        self._autocast = autocast

    def logprobs(self, batch: TrainBatch) -> TokenScores:
        """Score every completion token of `batch`; padding may hold anything."""
        rows = pack(batch, share_prompt=self.share_prompt)
        with self._autocast():
            hidden = self._backbone(rows.input_ids, position_ids=rows.position_ids, attention_mask=rows.attention_mask)
            logprobs, entropy = logprobs_from_hidden(
                hidden.flatten(0, 1).index_select(0, rows.sources),
                self._backbone.head,
                rows.targets,
                temperature=self._temperature,
                num_token_ids=self._num_token_ids,
                chunk_tokens=self._chunk_tokens,
            )
        mask = batch.completion_mask
        padded = logprobs.new_zeros(mask.shape)
        return TokenScores(padded.masked_scatter(mask, logprobs), padded.masked_scatter(mask, entropy))

    def named_tensors(self) -> dict[str, Tensor]:
        """Weights and persistent buffers by name, tied ones once; detached, not copied."""
        once = dict(self.model.named_parameters()) | dict(self.model.named_buffers())
        return {name: tensor for name, tensor in self.model.state_dict().items() if name in once}
