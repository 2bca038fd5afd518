"""What holds for every test and the processes it starts: one CPU thread, no network, no account."""

import os

import torch

os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", NETRC=os.devnull)
for variable in ("WANDB_API_KEY", "WANDB_MODE"):
    os.environ.pop(variable, None)
torch.set_num_threads(1)
