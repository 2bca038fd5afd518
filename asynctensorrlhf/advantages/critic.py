"""How the value head is trained.

Knows the settings; does not know the head or its optimizer.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Critic:
    """Settings of the value head.

    Attributes:
        lr: its learning rate, > 0; follows the schedule of the policy's.
        num_warmup_steps: first trainer steps in which only the head learns, >= 0.
        clip_eps: how far a value may move in a step, reward units, > 0; None: anywhere.
        max_grad_norm: of the head's gradient, > 0; None: no limit.
    """

    lr: float
    num_warmup_steps: int
    clip_eps: float | None
    max_grad_norm: float | None

    def __post_init__(self) -> None:
        if not self.lr > 0:
            raise ValueError(f"advantage.critic.lr must be > 0, got {self.lr}")
        if not self.num_warmup_steps >= 0:
            raise ValueError(f"advantage.critic.num_warmup_steps must be >= 0, got {self.num_warmup_steps}")
        for key, value in (("clip_eps", self.clip_eps), ("max_grad_norm", self.max_grad_norm)):
            if value is not None and not value > 0:
                raise ValueError(f"advantage.critic.{key} must be > 0 or null, got {value}")
