"""Every loss of the room, composed as a run would, and inputs that all of them can read."""

from __future__ import annotations

from dataclasses import replace

import torch

from asynctensorrlhf.losses.aggregation import AGGREGATIONS, count_tokens_and_sequences
from asynctensorrlhf.losses.aipo import AIPO
from asynctensorrlhf.losses.correction import ImportanceCorrection, NoCorrection
from asynctensorrlhf.losses.dppo import DPPO
from asynctensorrlhf.losses.gspo import GSPO
from asynctensorrlhf.losses.kl import KL_ESTIMATORS
from asynctensorrlhf.losses.m2po import DEFAULTS, M2PO
from asynctensorrlhf.losses.opsm import OPSM
from asynctensorrlhf.losses.policy_gradient import CISPO, TOPR, Reinforce
from asynctensorrlhf.losses.ppo import PPO
from asynctensorrlhf.types import LossInputs

FRAME = {
    "proximal": "rollout",
    "correction": NoCorrection(),
    "aggregation": "token_mean",
    "sequences": "trained",
    "loss_scale": None,
    "kl_coef": 0.0,
    "kl_estimator": "k3",
    "entropy_coef": 0.0,
}
CLIP = {"clip_eps_low": 0.2, "clip_eps_high": 0.28}
SETTINGS = {
    PPO: {**CLIP, "dual_clip": 3.0},
    GSPO: {**CLIP, "sequence_ratio": "geometric", "aggregation": "seq_mean_token_mean"},
    Reinforce: {"ratio_cap": 2.0},
    CISPO: {"clip_eps_low": None, "clip_eps_high": 0.28},
    TOPR: {},
    AIPO: {"ratio_cap": 8.0},
    OPSM: {**CLIP, "dual_clip": None, "sequence_kl_threshold": 0.2},
    DPPO: {"tv_threshold_low": 0.2, "tv_threshold_high": 0.2, "ratio_cap": 20.0},
    M2PO: {**DEFAULTS, **CLIP, "ratio_sq_threshold": 2.25},
}


def composed(loss_class=PPO, **changes):
    return loss_class(**{**FRAME, **SETTINGS[loss_class], **changes})


def weights(ratio="token", *, cap=None, accept=None, low=None, high=None):
    return ImportanceCorrection(ratio=ratio, cap=cap, accept=accept, accept_low=low, accept_high=high)


CORRECTIONS = {
    "none": NoCorrection(),
    "tis": weights(cap=2.0),
    "mis": weights(accept="token", low=0.5, high=2.0),
    "decoupled": weights(accept="token", high=5.0),
    "sequence_tis": weights("sequence", cap=2.0),
    "sequence_mis": weights("sequence", accept="sequence", low=0.5, high=2.0),
    "geometric": weights("one", accept="geometric", low=0.7, high=1.4),
    "geometric_tis": weights(cap=2.0, accept="geometric", low=0.7, high=1.4),
}


LOSSES = {
    "ppo": composed(),
    "gspo": composed(GSPO),
    "reinforce": composed(Reinforce),
    "cispo": composed(CISPO),
    "topr": composed(TOPR),
    "aipo": composed(AIPO),
    "opsm": composed(OPSM),
    "dppo": composed(DPPO),
    "m2po": composed(M2PO),
    "everything": composed(
        GSPO,
        proximal="loglinear",
        correction=CORRECTIONS["geometric_tis"],
        kl_coef=0.1,
        kl_estimator="k3_unbiased",
        entropy_coef=0.01,
    ),
    **{
        f"ppo-{mode}": composed(aggregation=mode, loss_scale=8.0 if mode == "seq_mean_token_sum_norm" else None)
        for mode in AGGREGATIONS
    },
    "ppo-all-sequences": composed(aggregation="seq_mean_token_mean", sequences="all"),
    "rloo": composed(GSPO, sequence_ratio="product"),
    "reinforce-plain": composed(Reinforce, ratio_cap=None),
    "cispo-two-sided": composed(CISPO, clip_eps_low=0.2),
    "m2po-second_moment": composed(M2PO, variant="second_moment"),
    "m2po-all_tokens": composed(M2PO, variant="second_moment", eligible="all"),
    "m2po-adaptive_clip": composed(M2PO, variant="adaptive_clip"),
    **{
        f"ppo-recompute-{name}": composed(proximal="recompute", correction=correction)
        for name, correction in CORRECTIONS.items()
    },
    "ppo-loglinear": composed(proximal="loglinear"),
    "ppo-loglinear-mis": composed(proximal="loglinear", correction=CORRECTIONS["mis"]),
    **{
        f"{loss_class.__name__}-recompute-tis": composed(
            loss_class, proximal="recompute", correction=CORRECTIONS["tis"]
        )
        for loss_class in (GSPO, CISPO, OPSM, M2PO)
    },
    **{f"ppo-kl-{name}": composed(kl_coef=0.1, kl_estimator=name) for name in KL_ESTIMATORS},
    "ppo-entropy": composed(entropy_coef=0.01),
}

PER_TOKEN = (
    "policy_logprobs",
    "behaviour_logprobs",
    "advantages",
    "proximal_logprobs",
    "ref_logprobs",
    "entropy",
    "token_versions",
)
LOGPROBS = ("policy_logprobs", "behaviour_logprobs", "proximal_logprobs", "ref_logprobs")


def full_inputs(*, num_samples=5, width=7, seed=0, dtype=torch.float64, spread=0.6):
    """Every optional input, unequal lengths from 1 to `width`, per-token advantages of both signs."""
    generator = torch.Generator().manual_seed(seed)
    shape = (num_samples, width)

    def near(logprobs):
        return logprobs + spread * torch.randn(shape, generator=generator, dtype=dtype)

    behaviour = -3 * torch.rand(shape, generator=generator, dtype=dtype)
    proximal = near(behaviour)
    mask = torch.arange(width) < (torch.arange(num_samples) % width + 1)[:, None]
    num_tokens, num_sequences = count_tokens_and_sequences(mask, "trained")
    return LossInputs(
        policy_logprobs=near(proximal),
        behaviour_logprobs=behaviour,
        advantages=torch.randn(shape, generator=generator, dtype=dtype),
        loss_mask=mask,
        global_num_tokens=num_tokens,
        global_num_sequences=num_sequences,
        proximal_logprobs=proximal,
        ref_logprobs=near(behaviour),
        entropy=2 * torch.rand(shape, generator=generator, dtype=dtype),
        token_versions=torch.randint(2, 11, shape, generator=generator),
        policy_version=9,
    )


def annotated(loss, inputs):
    """Inputs with what a trainer adds of the whole batch: denominators and the loss's plan."""
    num_tokens, num_sequences = count_tokens_and_sequences(inputs.loss_mask, loss.sequences)
    inputs = replace(inputs, global_num_tokens=num_tokens, global_num_sequences=num_sequences)
    return replace(inputs, plan=loss.plan(inputs)) if "plan" in loss.needs else inputs


def rows(inputs, index):
    """The micro-batch of these samples."""
    changes = {name: getattr(inputs, name)[index] for name in (*PER_TOKEN, "loss_mask")}
    plan = inputs.plan and inputs.plan.cut(lambda tensor: tensor[index])
    return replace(inputs, **changes, plan=plan)


def run(loss, inputs):
    """The output, and the gradients of the policy's log-probs and of the entropy, from fresh leaves."""
    leaves = {name: getattr(inputs, name).detach().clone().requires_grad_() for name in ("policy_logprobs", "entropy")}
    output = loss(replace(inputs, **leaves))
    output.loss.backward()
    gradients = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves.values()]
    return output, torch.stack(gradients)
