"""The golden vectors and one small batch for the tests of the losses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from asynctensorrlhf.types import LossInputs

VECTORS = Path(__file__).parents[1] / "golden" / "loss_vectors.json"
TOLERANCE = {torch.float64: {"rtol": 0.0, "atol": 1e-9}, torch.float32: {"rtol": 2e-5, "atol": 2e-6}}


class Golden:
    """One vector at one precision: inputs as tensors, expectations compared under the mask."""

    def __init__(self, vector_id, dtype):
        vectors = json.loads(VECTORS.read_text())["vectors"]
        vector = next(vector for vector in vectors if vector["id"] == vector_id)
        self.config, self.expected, self.dtype = vector["config"], vector["expected"], dtype
        self.inputs = {name: torch.tensor(value, dtype=dtype) for name, value in vector["inputs"].items()}
        self.mask = self.inputs["mask"].bool() if "mask" in self.inputs else torch.ones(1, 4, dtype=torch.bool)

    def plain(self):
        """policy, behaviour, advantages, mask; the policy is a leaf that asks for a gradient."""
        policy = self.inputs["logp_new"].clone().requires_grad_()
        return policy, self.inputs["logp_old"], self.inputs["advantages"], self.mask

    def check(self, actual, *path):
        """Compares with the expectation that lies under these keys."""
        expected = self.expected
        for key in path:
            expected = expected[key]
        expected = torch.tensor(expected, dtype=self.dtype)
        torch.testing.assert_close(actual.detach().to(self.dtype), expected, **TOLERANCE[self.dtype])


@pytest.fixture(params=[torch.float64, torch.float32], ids=["float64", "float32"])
def golden(request):
    return lambda vector_id: Golden(vector_id, request.param)


def random_inputs(*, num_samples=5, width=7, seed=0, dtype=torch.float64, spread=0.6):
    """Unequal lengths from 1 to `width`, per-token advantages of both signs, denominators of the batch itself."""
    generator = torch.Generator().manual_seed(seed)
    shape = (num_samples, width)
    behaviour = -3 * torch.rand(shape, generator=generator, dtype=dtype)
    policy = behaviour + spread * torch.randn(shape, generator=generator, dtype=dtype)
    lengths = torch.arange(num_samples) % width + 1
    mask = torch.arange(width) < lengths[:, None]
    return LossInputs(
        policy_logprobs=policy.requires_grad_(),
        behaviour_logprobs=behaviour,
        advantages=torch.randn(shape, generator=generator, dtype=dtype),
        loss_mask=mask,
        global_num_tokens=mask.sum(),
        global_num_sequences=mask.any(dim=1).sum(),
    )


@pytest.fixture(scope="session")
def make_inputs():
    return random_inputs


@pytest.fixture
def golden_edges():
    """Threshold, input and expectation of one edge case of M2PO's mask."""
    vectors = json.loads(VECTORS.read_text())["vectors"]
    vector = next(vector for vector in vectors if vector["id"] == "m2po_mask_edge_cases")
    return lambda case: (vector["config"]["m2_threshold"], vector["inputs"][case], vector["expected"][case])
