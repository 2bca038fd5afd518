"""Losses as one graph of the compiler."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMPILE = """
import sys
import torch
from tests.losses import composed

for name in sys.argv[1:] or composed.LOSSES:
    torch.compiler.reset()
    loss = composed.LOSSES[name]
    inputs = composed.annotated(loss, composed.full_inputs(dtype=torch.float32))
    fields = {**vars(inputs), "plan": None}  # the loss makes it, in the same graph

    def evaluate(policy, entropy):
        return loss(composed.LossInputs(**{**fields, "policy_logprobs": policy, "entropy": entropy})).loss

    gradients = []
    for function in (evaluate, torch.compile(evaluate, fullgraph=True, backend="aot_eager")):
        leaves = [value.clone().requires_grad_() for value in (inputs.policy_logprobs, inputs.entropy)]
        value = function(*leaves)
        value.backward()
        gradients.append((value.detach(), leaves[0].grad, leaves[1].grad))
    torch.testing.assert_close(*gradients, msg=lambda message: f"{name}: {message}")
"""


def compile_losses(*names):
    # In a process of its own: here the records are built under shape checks, which the compiler can't trace.
    subprocess.run([sys.executable, "-c", COMPILE, *names], cwd=ROOT, check=True, timeout=300)


def test_ppo_m2po_and_all_stages_together_compile_to_one_graph():
    compile_losses("ppo", "m2po", "everything")


@pytest.mark.slow
def test_every_composition_compiles_to_one_graph():
    compile_losses()
