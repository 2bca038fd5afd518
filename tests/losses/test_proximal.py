"""The proximal policy that is guessed from versions."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from asynctensorrlhf.losses.proximal import PROXIMAL_POLICIES, loglinear_logprobs, loglinear_weight
from tests.losses.composed import full_inputs


@pytest.mark.parametrize("as_integer", [True, False], ids=["integer", "float"])
def test_the_guess_equals_the_golden_vector(golden, as_integer):
    vector = golden("prox_logp_loglinear")
    versions, current = vector.inputs["versions"], vector.config["current_version"]
    versions = versions.long() if as_integer else versions
    weight = loglinear_weight(versions, current, vector.dtype)
    vector.check(weight * vector.mask, "alpha")
    policy, behaviour = vector.inputs["logp_new"].requires_grad_(), vector.inputs["logp_behave"]
    guess = loglinear_logprobs(policy, behaviour, versions, current)
    vector.check(guess * vector.mask, "logp_prox")
    assert not guess.requires_grad


def test_the_weight_is_how_far_the_sampler_lags():
    versions = torch.tensor([[4, 8, 9, 10, 11, -1]])
    torch.testing.assert_close(loglinear_weight(versions, 10), torch.tensor([[5 / 6, 0.5, 0.0, 0.0, 0.0, 0.0]]))


def test_tokens_of_the_version_at_the_start_of_the_step_keep_the_samplers_log_probs():
    inputs = full_inputs()
    fresh = replace(inputs, token_versions=torch.full_like(inputs.token_versions, inputs.policy_version))
    assert torch.equal(PROXIMAL_POLICIES["loglinear"](fresh), inputs.behaviour_logprobs)
    stale = replace(inputs, token_versions=torch.full_like(inputs.token_versions, inputs.policy_version - 1))
    halfway = (inputs.behaviour_logprobs + inputs.policy_logprobs) / 2
    torch.testing.assert_close(PROXIMAL_POLICIES["loglinear"](stale), halfway)


@pytest.mark.parametrize("missing", ["token_versions", "policy_version"])
def test_a_guess_without_versions_is_refused(missing):
    with pytest.raises(ValueError, match=r"loss.proximal=loglinear needs token_versions and policy_version"):
        PROXIMAL_POLICIES["loglinear"](replace(full_inputs(), **{missing: None}))
