"""Rewards: scores of completions, computed from their ids where these are.

Knows answers and completions; does not know policies or losses.
"""
