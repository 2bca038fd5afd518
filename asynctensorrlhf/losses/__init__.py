"""Policy losses: pure functions of log-probabilities and advantages.

Knows formulas, denominators and their diagnostics; does not know buffers, models or optimizers.
"""
