"""Reference vectors of losses, advantages and diagnostics, run through the package's own functions.

Knows the file's format and which function each name stands for; does not know a formula.

    python -m asynctensorrlhf.bench.vectors FILE
"""
