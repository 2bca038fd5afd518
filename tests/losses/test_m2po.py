"""M2PO in its three forms: golden numbers, what each divides by, and what they refuse."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from asynctensorrlhf.losses.m2po import M2PO, compute_m2po_loss
from asynctensorrlhf.losses.policy_loss import whole_batch
from asynctensorrlhf.losses.ppo import compute_ppo_loss
from tests.losses.composed import CORRECTIONS, annotated, composed, full_inputs, rows, run

PLAIN = {"clip_eps_low": 0.2, "clip_eps_high": 0.2, "ratio_sq_threshold": 2.25}


def m2po(**changes):
    return composed(M2PO, **{**PLAIN, **changes})


def plain(policy, advantage=-1.0):
    """Log-ratios of one sample whose tokens all have one advantage."""
    policy = torch.tensor([policy], dtype=torch.float64)
    return policy, torch.zeros_like(policy), torch.tensor([advantage]), torch.ones_like(policy, dtype=torch.bool)


def test_the_ratio_threshold_equals_the_golden_vector(golden):
    vector = golden("m2po_ratio_threshold")
    policy, *rest = vector.plain()
    output = compute_m2po_loss(policy, *rest, ratio_sq_threshold=2.0)
    output.loss.backward()
    vector.check(output.loss, "loss")
    vector.check(policy.grad, "grad_logp_new")
    vector.check(output.metrics["ratio/m2_ratio"], "m2_ratio")
    vector.check(output.metrics["m2po/m2_ratio_kept"], "m2_ratio_kept")
    vector.check(output.metrics["m2po/masked_fraction"], "masked_frac")
    vector.check(output.metrics["loss/clip_fraction"], "clip_frac")
    assert output.metrics["m2po/kept_weight"].item() == pytest.approx(12 / vector.expected["n_kept"])
    vector.check(m2po(ratio_sq_threshold=2.0).plan(whole_batch(policy, *rest)).keep_mask, "keep_mask")


def test_the_second_moment_equals_the_golden_vector(golden):
    vector = golden("m2po_second_moment_mask")
    policy, *rest = vector.plain()
    output = compute_m2po_loss(policy, *rest, variant="second_moment")
    output.loss.backward()
    vector.check(output.loss, "loss")
    vector.check(policy.grad, "grad_logp_new")
    for metric, name in (
        ("m2_before",) * 2,
        ("m2_after",) * 2,
        ("m2_all", "m2_all_tokens"),
        ("masked_fraction", "masked_frac"),
    ):
        vector.check(output.metrics[f"m2po/{metric}"], name)
    assert output.metrics["m2po/eligible_fraction"].item() == pytest.approx(vector.expected["n_trust_region"] / 12)


def test_the_adaptive_clip_equals_the_golden_vector(golden):
    vector = golden("m2po_adaptive_clip")
    policy, *rest = vector.plain()
    output = compute_m2po_loss(policy, *rest, variant="adaptive_clip")
    output.loss.backward()
    vector.check(output.loss, "loss")
    vector.check(output.metrics["m2po/clip_eps_low"], "eps_low")
    vector.check(output.metrics["m2po/clip_eps_high"], "eps_high")
    vector.check(output.metrics["m2po/m2_before"], "m2_before")
    vector.check(output.metrics["m2po/m2_after"], "m2_after")
    expected = torch.tensor(vector.expected["grad_logp_new"], dtype=vector.dtype)
    for row, column in vector.expected["grad_tie_positions"]:
        policy.grad[row, column] = expected[row, column]
    vector.check(policy.grad, "grad_logp_new")


@pytest.mark.parametrize("variant", ["ratio_threshold", "second_moment"])
def test_with_every_token_masked_the_loss_is_zero_and_still_has_a_gradient(variant):
    loss = m2po(variant=variant, m2_threshold=1e-12)
    policy, behaviour, advantages, mask = plain([1.0, 2.0], advantage=1.0)
    leaf = policy.requires_grad_()
    output = loss(whole_batch(leaf, behaviour, advantages, mask))
    output.loss.backward()
    assert output.loss.item() == 0.0
    assert not leaf.grad.any()
    assert output.metrics["m2po/masked_fraction"].item() == 1.0
    assert output.metrics["m2po/masked_fraction_positive"].item() == 1.0
    assert output.metrics["m2po/masked_fraction_negative"].item() == 0.0


def test_masked_tokens_are_neither_in_the_sum_nor_in_the_denominator():
    tokens = plain([math.log(2.5), 0.0, 0.0])
    assert compute_m2po_loss(*tokens).loss.item() == pytest.approx(1.0)
    assert compute_m2po_loss(*tokens, denominator="all_tokens").loss.item() == pytest.approx(2 / 3)
    assert compute_ppo_loss(*tokens).loss.item() == pytest.approx(1.5)


def test_the_second_moment_clips_nothing_and_divides_by_all_tokens():
    tokens = plain([0.1, 0.1, 1.5], advantage=1.0)
    ratio = math.exp(0.1)
    assert compute_m2po_loss(*tokens, variant="second_moment").loss.item() == pytest.approx(-2 * ratio / 3)
    kept = compute_m2po_loss(*tokens, variant="second_moment", denominator="kept_tokens")
    assert kept.loss.item() == pytest.approx(-ratio)
    clipped = compute_m2po_loss(*tokens, variant="second_moment", keep_ppo_clip=True, clip_eps_high=0.05)
    assert clipped.loss.item() == pytest.approx(-2 * 1.05 / 3)


def test_the_threshold_without_the_clip_bounds_nothing_below_it():
    tokens = plain([math.log(1.9)], advantage=1.0)
    assert compute_m2po_loss(*tokens).loss.item() == pytest.approx(-1.2)
    assert compute_m2po_loss(*tokens, keep_ppo_clip=False).loss.item() == pytest.approx(-1.9)


def test_a_threshold_that_nothing_reaches_makes_it_ppo():
    inputs = full_inputs()
    tokens = (inputs.policy_logprobs, inputs.behaviour_logprobs, inputs.advantages, inputs.loss_mask)
    ppo, other = compute_ppo_loss(*tokens), compute_m2po_loss(*tokens, ratio_sq_threshold=1e30)
    torch.testing.assert_close(other.loss, ppo.loss)
    assert {name: other.metrics[name] for name in ppo.metrics} == ppo.metrics


def test_a_budget_that_nothing_exceeds_leaves_the_surrogate_as_it_is():
    inputs = full_inputs()
    unbounded, adaptive = (
        run(m2po(variant=variant, m2_threshold=1e9), inputs)[0].loss for variant in ("second_moment", "adaptive_clip")
    )
    torch.testing.assert_close(adaptive, unbounded)


@pytest.mark.parametrize("variant", ["ratio_threshold", "second_moment", "adaptive_clip"])
def test_the_decision_is_a_constant_of_the_whole_batch_and_not_of_a_micro_batch(variant):
    loss, inputs = m2po(variant=variant, m2_threshold=0.3), full_inputs(num_samples=9, spread=1.0)
    assert loss.needs == {"plan"}
    planned = annotated(loss, inputs)
    assert not planned.plan.keep_mask.requires_grad
    own = sum(run(loss, replace(rows(planned, part), plan=None))[0].loss for part in (slice(0, 5), slice(5, None)))
    cut = sum(run(loss, rows(planned, part))[0].loss for part in (slice(0, 5), slice(5, None)))
    whole = run(loss, inputs)[0].loss
    torch.testing.assert_close(cut, whole)
    assert not torch.isclose(own, whole), "these inputs don't tell the two apart"


def test_masked_tokens_have_no_gradient():
    loss, inputs = m2po(), full_inputs(spread=1.0)
    plan = loss.plan(inputs)
    assert 0 < plan.num_kept < inputs.loss_mask.sum()
    assert not run(loss, inputs)[1][0][~plan.keep_mask].any()


@pytest.mark.parametrize("variant", ["ratio_threshold", "second_moment"])
def test_a_live_nan_shows_also_where_its_token_is_masked(variant):
    loss = m2po(variant=variant)
    policy, behaviour, _, mask = plain([3.0, 0.0])
    advantages = torch.tensor([[math.nan, 1.0]], dtype=torch.float64)
    assert loss(whole_batch(policy, behaviour, advantages, mask)).loss.isnan()


def test_the_entropy_of_masked_tokens_is_logged_when_it_is_known():
    loss, inputs = m2po(), full_inputs(spread=1.0)
    plan = loss.plan(inputs)
    masked = inputs.loss_mask & ~plan.keep_mask
    assert plan.metrics["m2po/masked_entropy"].item() == pytest.approx(inputs.entropy[masked].mean().item())
    assert "m2po/masked_entropy" not in loss.plan(replace(inputs, entropy=None)).metrics


def test_a_threshold_that_makes_the_upper_clip_dead_code_warns():
    with pytest.warns(UserWarning, match=r"loss.ratio_sq_threshold=1.44 .* would clip; above 1.44"):
        m2po(ratio_sq_threshold=1.44)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"variant": "third"},
            "loss.variant must be one of ratio_threshold, second_moment, adaptive_clip, got 'third'",
        ),
        ({"eligible": "some"}, "loss.eligible must be one of trust_region, all, got 'some'"),
        ({"denominator": "rows"}, "loss.denominator must be one of all_tokens, kept_tokens, got 'rows'"),
        ({"m2_threshold": 0.0}, "loss.m2_threshold must be > 0, got 0.0"),
        ({"ratio_sq_threshold": math.nan}, "loss.ratio_sq_threshold must be >= 0, got nan"),
        ({"clip_floor_low": 1.0}, r"loss.clip_floor_low must be in \(0, 1\) or null, got 1.0"),
        ({"clip_floor_high": 0.0}, "loss.clip_floor_high must be > 0 or null, got 0.0"),
        ({"variant": "adaptive_clip", "keep_ppo_clip": False}, "loss.keep_ppo_clip must not be false .*adaptive_clip"),
        ({"aggregation": "seq_mean_token_mean"}, "loss.denominator=kept_tokens needs loss.aggregation=token_mean"),
        (
            {"variant": "second_moment", "proximal": "recompute", "correction": CORRECTIONS["tis"]},
            "loss.correction corrects twice with loss.variant=second_moment",
        ),
        (
            {"variant": "adaptive_clip", "proximal": "recompute"},
            "loss.proximal=recompute makes no sense with loss.variant=adaptive_clip",
        ),
        ({"correction": CORRECTIONS["tis"]}, "loss.correction corrects twice with loss.proximal=rollout"),
    ],
)
def test_an_impossible_setting_is_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=message):
        m2po(**changes)
