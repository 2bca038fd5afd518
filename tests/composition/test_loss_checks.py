"""Objectives that make no sense are refused with the reason; those that probably don't are warned of."""

import pytest
from omegaconf import OmegaConf

from tests.composition.composing import CORRECTED, PRESETS, app, complaint, compose, plan

REFUSED = [
    (("loss=tis", "loss.proximal=rollout"), "corrects twice with loss.proximal=rollout"),
    (("loss=m2po_second_moment", "loss/correction=tis"), "loss.correction corrects twice"),
    (("loss=m2po_second_moment", "loss.proximal=recompute"), "makes no sense with loss.variant=second_moment"),
    (("loss=m2po", "loss.m2_threshold=0.1"), "loss.m2_threshold=0.1: is not read with loss.variant=ratio_threshold"),
    (("loss=m2po_second_moment", "loss.clip_eps_high=0.3"), "unless loss.keep_ppo_clip=true"),
    (("loss=grpo", "advantage=gae", "loss.kl_coef=0.1", "advantage.kl_coef=0.1"), "set one of them to 0"),
    (("trainer.kl_target=0.1",), "there is no KL term to adapt"),
    (("trainer.overlong=penalty",), "trainer.overlong_buffer=null"),
    (("trainer.overlong=penalty", "trainer.overlong_buffer=6"), "must be < rollout.max_new_tokens=6"),
    (("trainer.overlong_buffer=2",), "is not read with trainer.overlong=keep"),
    (("rollout.group_size=1", "loss=rloo"), "every group-relative advantage would be 0"),
    (("rollout.group_size=1", "loss=reinforce_plus_plus", "advantage.adv_baseline=group_mean"), "would be 0"),
    ((*CORRECTED, "loss/correction=tis", "loss.correction.cap=0"), "loss.correction.cap=0"),
    (("loss.loss_scale=3.0",), "loss.loss_scale must be null unless"),
    (("advantage.adv_std=none", "advantage.adv_std_level=batch"), "advantage.adv_std_level=batch"),
]
WARNED = [
    (("loss.kl_coef=0.1", "loss.kl_estimator=k1"), "its expected gradient as a loss is 0"),
    (("loss=ppo", "loss.proximal=recompute"), "its ratio is always 1"),
    (("loss.kl_estimator=k2",), "loss.kl_estimator=k2 is not read without loss.kl_coef > 0"),
    (("loss.sequences=all",), "loss.sequences=all is not read"),
    (("model.ref_path=x",), "model.ref_path=x is not read"),
    (("loss=m2po", "loss.ratio_sq_threshold=1.2"), "masks every ratio"),
]
ALLOWED = [
    ("rollout.group_size=1", "advantage=gae"),
    ("rollout.group_size=1", "loss=reinforce_plus_plus"),
    ("loss=ppo", "loss.proximal=recompute", "trainer.minibatches_per_step=4"),
    ("loss=m2po_second_moment", "loss.keep_ppo_clip=true", "loss.clip_eps_high=0.3"),
    ("loss=m2po_adaptive_clip", "loss.clip_floor_low=0.1"),
    ("advantage=gae", "advantage.kl_coef=0.1", "trainer.kl_target=0.05"),
    ("trainer.overlong=penalty", "trainer.overlong_buffer=2"),
    ("loss=ppo", "loss.proximal=loglinear"),
]


@pytest.mark.parametrize(("overrides", "reason"), REFUSED, ids=lambda value: " ".join(value) if value else None)
def test_an_objective_that_makes_no_sense_is_refused_with_the_reason(overrides: tuple[str, ...], reason: str) -> None:
    assert reason in complaint(*overrides)


@pytest.mark.parametrize(("overrides", "reason"), WARNED, ids=lambda value: " ".join(value) if value else None)
def test_one_that_is_probably_not_meant_is_warned_of(overrides: tuple[str, ...], reason: str) -> None:
    planned = plan(*overrides)
    assert planned.error is None
    assert any(reason in warning for warning in planned.warnings)


@pytest.mark.parametrize("overrides", ALLOWED, ids=" ".join)
def test_one_that_makes_sense_is_neither(overrides: tuple[str, ...]) -> None:
    planned = plan(*overrides)
    assert (planned.error, planned.warnings) == (None, ())


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_is_allowed_and_says_its_source_in_its_first_line(preset: str) -> None:
    planned = plan(f"loss={preset}")
    assert (planned.error, planned.warnings) == (None, ())
    files = app().schema((f"loss={preset}",), compose(f"loss={preset}"))
    assert files.knows("loss.aggregation")


@pytest.mark.parametrize("preset", ["rloo", "dr_grpo", "reinforce_plus_plus"])
def test_a_preset_that_means_an_advantage_selects_it_and_the_command_line_wins(preset: str) -> None:
    def advantage(*overrides: str) -> object:
        return OmegaConf.to_container(compose(*overrides).advantage, resolve=True)

    own = advantage(f"loss={preset}")
    assert own == advantage(f"advantage={preset}")
    assert own != advantage("advantage=group_relative")
    assert advantage(f"loss={preset}", "advantage=group_relative") == advantage("advantage=group_relative")
