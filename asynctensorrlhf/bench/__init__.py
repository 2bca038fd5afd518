"""Checks and measurements of what is built: reference vectors and `atrlhf bench`.

Knows how to compare and to time; does not know a formula: what it runs is what a run uses.
"""
