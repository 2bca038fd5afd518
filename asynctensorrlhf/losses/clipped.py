"""The clipped policy loss over one micro-batch, from log-probabilities to a number with its metrics.

Knows the order mask, ratio, surrogate, aggregation; does not know which algorithm chose the settings.
"""

from jaxtyping import Bool, Float
from torch import Tensor

from asynctensorrlhf.losses.aggregation import aggregate, count_tokens_and_sequences
from asynctensorrlhf.losses.diagnostics import clip_fractions, ratio_maxima, ratio_moments
from asynctensorrlhf.losses.surrogate import clipped_surrogate, log_ratio, masked_advantages
from asynctensorrlhf.types import LossInputs, LossOutput


def clipped_policy_loss(
    inputs: LossInputs,
    *,
    clip_eps_low: float,
    clip_eps_high: float,
    dual_clip: float | None,
    aggregation: str,
    loss_scale: float | None,
) -> LossOutput:
    """The clipped surrogate of policy over behaviour, as one number.

    Args:
        inputs: one micro-batch.
        clip_eps_low: as in `clipped_surrogate`.
        clip_eps_high: as in `clipped_surrogate`.
        dual_clip: as in `clipped_surrogate`.
        aggregation: mode of `aggregate`.
        loss_scale: as in `aggregate`.
    """
    delta = log_ratio(inputs.policy_logprobs, inputs.behaviour_logprobs, inputs.loss_mask)
    advantages = masked_advantages(inputs.advantages, inputs.loss_mask, delta.dtype)
    per_token = clipped_surrogate(
        delta, advantages, clip_eps_low=clip_eps_low, clip_eps_high=clip_eps_high, dual_clip=dual_clip
    )
    loss = aggregate(
        per_token,
        inputs.loss_mask,
        mode=aggregation,
        global_num_tokens=inputs.global_num_tokens,
        global_num_sequences=inputs.global_num_sequences,
        loss_scale=loss_scale,
    )
    metrics = clip_fractions(
        delta,
        advantages,
        clip_eps_low=clip_eps_low,
        clip_eps_high=clip_eps_high,
        dual_clip=dual_clip,
        global_num_tokens=inputs.global_num_tokens,
    ) | ratio_moments(delta, inputs.loss_mask, global_num_tokens=inputs.global_num_tokens)
    return LossOutput(loss, metrics, ratio_maxima(delta))


def whole_batch(
    policy_logprobs: Float[Tensor, "sample token"],
    behaviour_logprobs: Float[Tensor, "sample token"],
    advantages: Float[Tensor, "sample token"] | Float[Tensor, " sample"],
    loss_mask: Bool[Tensor, "sample token"],
    *,
    sequences: str,
) -> LossInputs:
    """Inputs whose denominators are their own: these tensors are the whole optimizer batch.

    Advantages of one axis hold for every token of their sample.
    """
    num_tokens, num_sequences = count_tokens_and_sequences(loss_mask, sequences)
    per_token = advantages[:, None] if advantages.ndim == 1 else advantages
    return LossInputs(
        policy_logprobs=policy_logprobs,
        behaviour_logprobs=behaviour_logprobs,
        advantages=per_token.expand(loss_mask.shape),
        loss_mask=loss_mask,
        global_num_tokens=num_tokens,
        global_num_sequences=num_sequences,
    )
