"""Prompt sources: what a run draws its prompts from."""
