"""Behaviour correction: constant weights for what lies between the sampler and the proximal policy.

Knows ratios, caps and acceptance ranges; does not know the trust region that comes after, nor denominators: rejected
tokens stay in them, or the others would weigh more.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from asynctensorrlhf.losses.sequence_ratio import geometric_log_ratio, product_log_ratio


class Weights(NamedTuple):
    """Per-token weights, 0 where masked, and the tokens whose ratio was capped or rejected."""

    values: Float[Tensor, "sample token"]
    changed: Bool[Tensor, "sample token"]


@runtime_checkable
class Correction(Protocol):
    """Weights from the log-ratio of proximal over behaviour policy.

    Attributes:
        is_active: whether it does anything; an active one needs a proximal policy that is not the sampler.
    """

    @property
    def is_active(self) -> bool:
        """See above."""
        ...

    def __call__(
        self, log_ratio: Float[Tensor, "sample token"], loss_mask: Bool[Tensor, "sample token"]
    ) -> Weights | None:
        """Constant weights; None: 1 for every token."""
        ...


# which ratio of a token counts: its own, or one of its sequence
RATIOS: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "token": lambda log_ratio, mask: log_ratio.exp(),
    "sequence": lambda log_ratio, mask: product_log_ratio(log_ratio, mask).exp()[:, None].expand_as(log_ratio),
    "geometric": lambda log_ratio, mask: geometric_log_ratio(log_ratio, mask).exp()[:, None].expand_as(log_ratio),
    # NaN stays NaN: the loss must show it
    "one": lambda log_ratio, mask: log_ratio * 0.0 + 1.0,
}
DECISIVE = tuple(name for name in RATIOS if name != "one")


@dataclass(frozen=True)
class NoCorrection:
    """The sampler is taken for the proximal policy, or the gap between them for small."""

    is_active = False

    def __call__(
        self, log_ratio: Float[Tensor, "sample token"], loss_mask: Bool[Tensor, "sample token"]
    ) -> Weights | None:
        """No weights."""
        return None


@dataclass(frozen=True, kw_only=True)
class ImportanceCorrection:
    """w = min(rho, cap) where accept_low <= rho' <= accept_high, else 0; both rho proximal over behaviour, constants.

    With different rho and rho' every published form is a row:

        TIS             rho token     cap 2
        MIS, IcePop     rho token     rho' token      [0.5, 2], [0.5, 5]
        sequence TIS    rho sequence  cap 2
        sequence MIS    rho sequence  rho' sequence   [0.5, 2]
        geometric       rho one       rho' geometric  [0.999, 1.001]     rejection only
        masked TIS      rho token     rho' geometric  [0.999, 1.002]

    Bounds are inclusive. Ratios [0.7, 6.7] with cap 2 weigh [0.7, 2]; accepted in [0.5, 5] without cap, [0.7, 0].

    Attributes:
        ratio: rho, the weight of a token: `token` its own ratio, `sequence` the product over its sequence,
            `geometric` the geometric mean over it, `one` always 1.
        cap: largest weight, > 0; None: no limit.
        accept: rho', the ratio that decides: `token`, `sequence` or `geometric`; None: every token is accepted.
        accept_low: smallest rho' that is accepted, >= 0; None: no limit.
        accept_high: largest; None: no limit.

    Source:
        TIS: Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training"; MIS, the forms
        of whole sequences and the geometric filter: Liu, Li et al. 2025, "When Speed Kills Stability", as in verl,
        slime, TRL; IcePop, arXiv:2510.18855; a mask at 5 on the token's ratio: decoupled PPO of AReaL,
        arXiv:2505.24298. verl thresholds -log(rho) in its k1 filters, so that its bounds hold for 1 / rho; here they
        hold for rho.
    """

    ratio: str
    cap: float | None
    accept: str | None
    accept_low: float | None
    accept_high: float | None

    is_active = True

    def __post_init__(self) -> None:
        if self.ratio not in RATIOS:
            raise ValueError(f"loss.correction.ratio must be one of {', '.join(RATIOS)}, got {self.ratio!r}")
        if self.accept is not None and self.accept not in DECISIVE:
            allowed = ", ".join(DECISIVE)
            raise ValueError(f"loss.correction.accept must be one of {allowed} or null, got {self.accept!r}")
        if self.ratio == "one" and (self.accept is None or self.cap is not None):
            raise ValueError(
                "loss.correction.ratio=one weighs nothing: it needs loss.correction.accept and cap null, got "
                f"accept {self.accept}, cap {self.cap}; use loss/correction=none for no correction"
            )
        if self.cap is not None and not self.cap > 0:
            raise ValueError(f"loss.correction.cap must be > 0 or null, got {self.cap}")
        self._check_range()

    def _check_range(self) -> None:
        bounds = (self.accept_low, self.accept_high)
        if self.accept is None and bounds != (None, None):
            raise ValueError(
                f"loss.correction.accept_low and accept_high must be null without loss.correction.accept, got {bounds}"
            )
        if self.accept is not None and bounds == (None, None):
            raise ValueError(
                f"loss.correction.accept={self.accept} needs loss.correction.accept_low or accept_high, got neither"
            )
        low, high = self.accept_low or 0.0, self.accept_high
        if not low >= 0 or (high is not None and not low < high):
            raise ValueError(f"loss.correction.accept_low must be >= 0 and below accept_high, got {bounds}")

    def __call__(
        self, log_ratio: Float[Tensor, "sample token"], loss_mask: Bool[Tensor, "sample token"]
    ) -> Weights | None:
        """Weights of one micro-batch that holds whole sequences."""
        log_ratio = log_ratio.detach()
        weights = RATIOS[self.ratio](log_ratio, loss_mask)
        changed = torch.zeros_like(loss_mask)
        if self.cap is not None:
            changed = weights > self.cap
            weights = weights.clamp(max=self.cap)
        if self.accept is not None:
            decisive = RATIOS[self.accept](log_ratio, loss_mask)
            is_rejected = self._is_outside(decisive)
            changed = changed | is_rejected
            weights = torch.where(is_rejected, 0.0, weights)
        return Weights(torch.where(loss_mask, weights, 0.0), changed & loss_mask)

    def _is_outside(self, ratio: Float[Tensor, "sample token"]) -> Bool[Tensor, "sample token"]:
        """Outside the range that is accepted; a NaN is not, so that the loss shows it."""
        outside = torch.zeros_like(ratio, dtype=torch.bool)
        if self.accept_low is not None:
            outside = outside | (ratio < self.accept_low)
        if self.accept_high is not None:
            outside = outside | (ratio > self.accept_high)
        return outside
