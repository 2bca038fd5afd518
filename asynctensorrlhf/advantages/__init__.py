"""Advantages: how much better than expected a completion was.

Knows rewards and groups; does not know losses or who calls it.
"""
