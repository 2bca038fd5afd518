import random
import warnings

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from asynctensorrlhf.trainer.checkpoint import (
    check_checkpoint,
    complete_checkpoints,
    newest_checkpoint,
    read_optimizer,
    read_state,
    remove_old_checkpoints,
    restore_random_state,
    save_checkpoint,
    set_newer_aside,
)


def save_model(folder):
    save_file({"w": torch.arange(4.0)}, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')


def save(folder, step, **options):
    optimizer = {"state": {0: {"exp_avg": torch.full((2,), float(step))}}, "param_groups": [{"lr": 0.1}]}
    arguments = {"save_model": save_model, "optimizer": optimizer, "state": {"step": step}, **options}
    return save_checkpoint(folder, step=step, **arguments)


def test_what_was_saved_is_read_back(tmp_path):
    path = save(tmp_path, 3)
    assert path.name == "step_3"
    assert read_state(path) == {"step": 3}
    assert read_optimizer(path)["state"][0]["exp_avg"].tolist() == [3.0, 3.0]


def test_checkpoints_are_ordered_by_number_and_other_names_ignored(tmp_path):
    for step in (9, 100, 10):
        save(tmp_path, step)
    (tmp_path / "step_final").mkdir()
    (tmp_path / "step_11").write_text("a file")
    assert [path.name for path in complete_checkpoints(tmp_path)] == ["step_9", "step_10", "step_100"]
    assert newest_checkpoint(tmp_path)[0] == tmp_path / "step_100"


DAMAGES = [
    *(
        (name, damage)
        for name in ("state.json", "optimizer.pt", "model.safetensors", "config.json", "tokenizer.json", "COMPLETE")
        for damage in ("deleted", "emptied", "torn")
    ),
]


@pytest.mark.parametrize(("name", "damage"), DAMAGES)
def test_a_damaged_newest_checkpoint_is_passed_over_by_name(tmp_path, name, damage):
    save(tmp_path, 1)
    file = save(tmp_path, 2) / name
    if damage == "deleted":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2] if damage == "torn" else b"")
    found, skipped = newest_checkpoint(tmp_path)
    assert found == tmp_path / "step_1"
    assert len(skipped) == 1
    assert "step_2" in skipped[0]
    with pytest.raises(ValueError, match="step_2"):
        check_checkpoint(tmp_path / "step_2")


def test_a_save_that_breaks_off_leaves_the_last_checkpoint_and_no_new_one(tmp_path):
    save(tmp_path, 1)

    def full_disk(folder):
        (folder / "model.safetensors").write_bytes(b"half")
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space left"):
        save(tmp_path, 2, save_model=full_disk)
    assert newest_checkpoint(tmp_path) == (tmp_path / "step_1", [])


def test_an_empty_step_folder_is_skipped_and_named(tmp_path):
    save(tmp_path, 1)
    (tmp_path / "step_2").mkdir()
    found, skipped = newest_checkpoint(tmp_path)
    assert found == tmp_path / "step_1"
    assert "step_2" in skipped[0]


@pytest.mark.parametrize(("keep", "left"), [(1, ["step_30"]), (2, ["step_20", "step_30"]), (None, 4)])
def test_the_newest_checkpoints_are_kept(tmp_path, keep, left):
    for step in (3, 30, 20, 7):
        save(tmp_path, step)
    remove_old_checkpoints(tmp_path, keep=keep)
    names = [path.name for path in complete_checkpoints(tmp_path)]
    assert names == left or len(names) == left


def test_newer_checkpoints_are_set_aside_under_names_of_their_own(tmp_path):
    for _ in range(2):
        for step in (4, 9, 10):
            save(tmp_path, step)
        set_newer_aside(tmp_path, 4)
    assert [path.name for path in complete_checkpoints(tmp_path)] == ["step_4"]
    aside = {f"step_{step}.after_step_4{end}" for step in (9, 10) for end in ("", ".2")}
    assert {path.name for path in tmp_path.iterdir()} == {"step_4", *aside}


def test_half_written_folders_are_removed_with_the_old_ones(tmp_path):
    save(tmp_path, 1)
    (tmp_path / ".partial_step_9").mkdir()
    remove_old_checkpoints(tmp_path, keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step_1"]


def test_random_generators_go_on_where_they_were(tmp_path):
    path = save(tmp_path, 1)
    draws = (random.random(), np.random.rand(), torch.rand(1).item())
    restore_random_state(path)
    assert (random.random(), np.random.rand(), torch.rand(1).item()) == draws


@pytest.mark.parametrize("damage", ["deleted", "emptied", "torn", "other"])
def test_a_damaged_random_state_is_one_warning_that_names_the_file(tmp_path, damage):
    file = save(tmp_path, 1) / "random.pt"
    if damage == "deleted":
        file.unlink()
    elif damage == "other":
        torch.save({"torch": 1}, file)
    else:
        file.write_bytes(file.read_bytes()[:100] if damage == "torn" else b"")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        restore_random_state(tmp_path / "step_1")
    assert len(caught) == 1
    assert "random.pt" in str(caught[0].message)
