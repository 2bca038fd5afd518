"""Law 3 over processes: two ranks on fixed rollouts make the update of one."""

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer.gloo_update import CASES, run_case

ROOT = Path(__file__).parents[2]


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port: int = server.getsockname()[1]
    return port


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[list[dict[str, Any]]]:
    """Every case, as each of two gloo processes sees it."""
    folder = tmp_path_factory.mktemp("ranks")
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": "2",
    }
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.trainer.gloo_update", str(folder / f"{rank}.pt")],
            cwd=ROOT,
            env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(2)
    ]
    try:
        assert [process.wait(timeout=180) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("case", range(len(CASES)), ids=lambda case: "-".join(map(str, CASES[case])))
def test_two_processes_make_the_update_of_one(ranks: list[list[dict[str, Any]]], case: int) -> None:
    alone, first, second = run_case(*CASES[case]), ranks[0][case], ranks[1][case]
    assert torch.equal(first["weights"], second["weights"])
    assert first["reports"] == second["reports"]
    torch.testing.assert_close(first["weights"], alone["weights"], rtol=0, atol=1e-6)
    for together, single in zip(first["reports"], alone["reports"], strict=True):
        assert together.keys() == single.keys()
        for name in single.keys() - {"train/num_micro_batches"}:
            assert together[name] == pytest.approx(single[name], rel=1e-4, abs=1e-5), name
