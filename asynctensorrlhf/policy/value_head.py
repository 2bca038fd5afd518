"""The value head: what a state is worth, read off the policy's hidden states.

Knows hidden states and its own weights; does not know returns or advantages.
"""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from jaxtyping import Float
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

FILE = "value_head.safetensors"


class ValueHead(nn.Module):
    """Linear, tanh, linear on *detached* hidden states, in float32.

    The policy is not moved by the value loss: so the head needs no weight against the policy loss, has a learning rate
    of its own, and can be trained alone for a while. Its last layer starts at 0: every value is 0 at first.

    Args:
        hidden_size: of the policy.
        seed: of the first layer; the process's random state is left alone.
    """

    def __init__(self, hidden_size: int, *, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.inner = nn.Parameter(torch.randn(hidden_size, hidden_size, generator=generator) / hidden_size**0.5)
        self.inner_bias = nn.Parameter(torch.zeros(hidden_size))
        self.outer = nn.Parameter(torch.zeros(hidden_size))
        self.outer_bias = nn.Parameter(torch.zeros(()))

    def forward(self, hidden: Float[Tensor, "*batch hidden"]) -> Float[Tensor, "*batch"]:
        """One value for each hidden state, reward units."""
        with torch.autocast(hidden.device.type, enabled=False):
            features = torch.tanh(nn.functional.linear(hidden.detach().float(), self.inner, self.inner_bias))
            # a sum and not a matrix product, whose bits for one row depend on the number of rows
            return (features * self.outer).sum(-1) + self.outer_bias

    def save(self, folder: Path) -> None:
        """Write `value_head.safetensors` into the folder."""
        save_file({name: tensor.cpu() for name, tensor in self.state_dict().items()}, folder / FILE)

    def load(self, folder: Path) -> None:
        """Take the weights that `save` wrote.

        Raises:
            ValueError: the file is missing, damaged or of another model.
        """
        path = folder / FILE
        try:
            tensors = load_file(path)
            # on a copy first: torch takes the tensors that fit before it refuses the others
            copy.deepcopy(self).load_state_dict(tensors)
        except FileNotFoundError as error:
            raise ValueError(f"{path}: no such file; the checkpoint was made without a value head") from error
        except Exception as error:  # every way in which a torn or foreign file fails means the same
            raise ValueError(f"{path}: does not fit this value head ({' '.join(str(error).split())})") from error
        self.load_state_dict(tensors)
