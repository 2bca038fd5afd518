"""Combinations of keys of the objective: loss, advantage, reference, overlong completions.

Knows what these keys mean together, and which of them another value leaves unread; looks at keys that the chosen
options have, never at the names of options. What an object refuses by itself is not repeated here.
"""

from __future__ import annotations

from collections.abc import Callable

from asynctensorrlhf.composition.errors import ConfigError, show_value
from asynctensorrlhf.composition.values import Values

KL_COEFFICIENTS = ("loss.kl_coef", "advantage.kl_coef")


def group_has_something_to_compare(values: Values) -> None:
    """A group-relative advantage of a group of one is always 0, and so is its variance."""
    if values["rollout.group_size"] != 1:
        return
    if values.has("advantage.adv_std") or values["advantage.adv_baseline"] == "group_mean":
        raise ConfigError(
            "rollout.group_size=1: every group-relative advantage would be 0 and nothing would be learnt; "
            "use rollout.group_size >= 2"
        )
    if values["buffer.filter_zero_variance"] is True:
        raise ConfigError(
            "rollout.group_size=1: a group of one has no variance and buffer.filter_zero_variance drops it; "
            "use rollout.group_size >= 2, or buffer=versioned"
        )


def kl_counts_once(values: Values) -> None:
    """A pull to the reference in the reward and another one in the loss are the same term twice."""
    if all(values.is_on(path) for path in KL_COEFFICIENTS):
        raise ConfigError(
            f"loss.kl_coef={values['loss.kl_coef']}: advantage.kl_coef={values['advantage.kl_coef']} pulls to the "
            "reference too, through the reward; set one of them to 0"
        )


def kl_target_has_its_coefficient(values: Values) -> None:
    """An adaptive coefficient starts from one that is not 0."""
    if values.has("trainer.kl_target") and not any(values.is_on(path) for path in KL_COEFFICIENTS):
        raise ConfigError(
            f"trainer.kl_target={values['trainer.kl_target']}: there is no KL term to adapt; give loss.kl_coef or, "
            "where the advantage has it, advantage.kl_coef a value > 0"
        )


def overlong_penalty_has_its_buffer(values: Values) -> None:
    """The penalty grows over some of the last tokens that a completion may have."""
    buffer, longest = values["trainer.overlong_buffer"], values["rollout.max_new_tokens"]
    is_penalty = values["trainer.overlong"] == "penalty"
    if is_penalty and not values.has("trainer.overlong_buffer"):
        raise ConfigError(
            "trainer.overlong_buffer=null: trainer.overlong=penalty grows over it; give an int from 1 to below "
            f"rollout.max_new_tokens={longest}"
        )
    if is_penalty and buffer >= longest:
        raise ConfigError(f"trainer.overlong_buffer={buffer}: must be < rollout.max_new_tokens={longest}")
    if not is_penalty and values.has("trainer.overlong_buffer"):
        raise ConfigError(
            f"trainer.overlong_buffer={buffer}: is not read with trainer.overlong={values['trainer.overlong']}; "
            "use trainer.overlong=penalty"
        )


def variant_reads_what_is_set(values: Values) -> None:
    """A key of another variant of M2PO would be set in vain."""
    if not values.has("loss.variant"):
        return
    from asynctensorrlhf.losses.m2_variants import VARIANTS  # torch: only for a config that is right so far

    chosen = VARIANTS.get(values["loss.variant"])
    if chosen is None:
        return  # a loss of the user's own
    for key in sorted(frozenset().union(*(variant.reads for variant in VARIANTS.values())) - chosen.reads):
        readers = " or ".join(name for name, variant in VARIANTS.items() if key in variant.reads)
        _refuse_change(values, f"loss.{key}", f"but with {readers}")
    asked = values["loss.keep_ppo_clip"]
    if not (chosen.keeps_ppo_clip if asked is None else asked):
        for path in ("loss.clip_eps_low", "loss.clip_eps_high"):
            _refuse_change(values, path, "unless loss.keep_ppo_clip=true")


def _refuse_change(values: Values, path: str, otherwise: str) -> None:
    if values.is_changed(path):
        raise ConfigError(
            f"{path}={show_value(values[path])}: is not read with loss.variant={values['loss.variant']}, {otherwise}"
        )


def kl_has_a_gradient(values: Values) -> str | None:
    """The gradient of k1 is that of log pi, whose mean over the policy's own tokens is 0."""
    if not (values.is_on("loss.kl_coef") and values["loss.kl_estimator"] == "k1"):
        return None
    return (
        "loss.kl_estimator=k1: its expected gradient as a loss is 0, it only adds noise; k2 and k3_plus pull to the "
        "reference, k3 does the other way round, and k1 belongs into the reward (advantage.kl_coef)"
    )


def recomputed_ratio_moves(values: Values) -> str | None:
    """At the first update of a step the policy is the one that the step began with."""
    num_updates = values["trainer.epochs_per_step"], values["trainer.minibatches_per_step"]
    if values["loss.proximal"] != "recompute" or num_updates != (1, 1) or values.has("loss.correction.ratio"):
        return None
    return (
        "loss.proximal=recompute: with one update a step its ratio is always 1, so that nothing is clipped and nothing "
        "corrects for stale samples; add loss/correction=tis, or more trainer.minibatches_per_step"
    )


# a key, whether another one has it read, and what would
READERS: tuple[tuple[str, Callable[[Values], bool], str], ...] = (
    ("loss.kl_estimator", lambda values: values.is_on("loss.kl_coef"), "loss.kl_coef > 0"),
    (
        "loss.sequences",
        lambda values: str(values["loss.aggregation"]).startswith("seq_"),
        "a loss.aggregation over sequences",
    ),
    ("trainer.kl_horizon", lambda values: values.has("trainer.kl_target"), "trainer.kl_target"),
    ("model.ref_path", lambda values: any(map(values.is_on, KL_COEFFICIENTS)), "loss.kl_coef or advantage.kl_coef > 0"),
)


def changed_keys_are_read(values: Values) -> str | None:
    """Keys of terms that are off. Allowed: a sweep over a coefficient may start at 0."""
    unread = [
        f"{path}={show_value(values[path])} is not read without {reader}"
        for path, is_read, reader in READERS
        if values.is_changed(path) and not is_read(values)
    ]
    return "; ".join(unread) or None


LOSS_CHECKS: tuple[Callable[[Values], str | None], ...] = (
    group_has_something_to_compare,
    kl_counts_once,
    kl_target_has_its_coefficient,
    overlong_penalty_has_its_buffer,
    variant_reads_what_is_set,
    kl_has_a_gradient,
    recomputed_ratio_moves,
    changed_keys_are_read,
)
