"""Library use with nothing but the names that the package exports."""

import torch

from asynctensorrlhf import HFEngine, compute_grpo_loss, compute_ppo_loss
from asynctensorrlhf.warm_start import tiny_llama_path


def test_grpo_without_a_choice_of_advantages_is_ppo_on_population_normalised_rewards():
    torch.manual_seed(0)
    policy, behaviour = torch.randn(4, 3), torch.randn(4, 3)
    mask = torch.ones(4, 3, dtype=torch.bool)
    grpo = compute_grpo_loss(policy, behaviour, torch.tensor([[1.0, 0.0], [0.5, 0.5]]), mask, aggregation="token_mean")
    ppo = compute_ppo_loss(policy, behaviour, torch.tensor([1.0, -1.0, 0.0, 0.0]), mask)
    torch.testing.assert_close(grpo.loss, ppo.loss)


def test_an_engine_takes_its_model_by_place():
    engine = HFEngine(str(tiny_llama_path()), max_new_tokens=6)
    assert engine.is_idle()
