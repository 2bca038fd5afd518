"""Generation: engines, sampling, assembling, scoring, the rollout loop."""
