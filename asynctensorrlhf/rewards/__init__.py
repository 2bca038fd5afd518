"""Rewards: scores of completions, computed from their ids where these are.

Knows answers and completions; does not know policies or losses.
"""

from asynctensorrlhf.rewards.token_match import gpu_reward_simple, tensor_native_reward

__all__ = ["gpu_reward_simple", "tensor_native_reward"]
