import json
import os

import pytest
import torch

from asynctensorrlhf.types import Prompt, Sample, SampleGroup, StepReport, Ticket


def make_group():
    prompt = Prompt(0, 0, torch.tensor([1]), Ticket(0, 0))
    sample = Sample(prompt, 0, torch.tensor([2]), torch.zeros(1), torch.tensor([0]), "length")
    return SampleGroup(prompt, (sample,), torch.tensor([0.5]), torch.zeros(1), 0, 0)


def test_files_hold_every_step_and_sample(start, tmp_path):
    with start(mode="disabled") as telemetry:
        for step in (1, 2):
            telemetry.log(StepReport(step, step - 1, {"loss/total": float("inf"), "reward/mean": 0.25}))
            telemetry.log_samples(step, [make_group()], step - 1)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert rows[1] == {"step": 2, "policy_version": 1, "loss/total": None, "reward/mean": 0.25}
    samples = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert [(row["step"], row["staleness"]) for row in samples] == [(1, 0), (2, 1)]


def test_a_second_part_appends_to_the_files_of_the_first(start, tmp_path):
    for step in (1, 2):
        with start(mode="disabled") as telemetry:
            telemetry.log(StepReport(step, step, {}))
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
def test_a_full_disk_is_one_warning_per_file_and_the_run_goes_on(start, tmp_path, capsys):
    for name in ("metrics.jsonl", "samples.jsonl"):
        (tmp_path / name).symlink_to("/dev/full")
    with start(mode="disabled") as telemetry:
        for step in (1, 2, 3):
            telemetry.log(StepReport(step, step, {}))
            telemetry.log_samples(step, [make_group()], step)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(",")[0] for line in lines] == [
        "warning: metrics.jsonl failed",
        "warning: samples.jsonl failed",
    ]


def test_a_reader_that_is_gone_does_not_stop_the_run(start, tmp_path, capsys, monkeypatch):
    def gone(*_arguments, **_options):
        raise BrokenPipeError("nobody reads")

    with start(mode="disabled", print_every=1) as telemetry:
        monkeypatch.setattr("builtins.print", gone)
        for step in (1, 2):
            telemetry.log(StepReport(step, step, {}))
        telemetry.note("still here")
        monkeypatch.undo()
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2
    assert telemetry.warnings[0] == "the terminal failed, the run goes on: BrokenPipeError: nobody reads"


def test_health_warnings_are_shown_and_kept(start, capsys):
    with start(mode="disabled", health_window=2) as telemetry:
        for step in range(1, 6):
            telemetry.log(StepReport(step, step, {"rollout/truncated_fraction": 1.0}))
    assert len(telemetry.warnings) == 1
    assert telemetry.warnings[0].startswith("100% of the completions")
    assert capsys.readouterr().err == f"warning: {telemetry.warnings[0]}\n"


def test_a_short_run_is_warned_at_its_end_after_its_last_line(start, capfd):
    with start(mode="disabled", health_window=20) as telemetry:
        for step in (1, 2):
            telemetry.log(StepReport(step, step, {"reward/zero_variance_fraction": 1.0, "time/step_s": 1.0}))
    out, err = capfd.readouterr()
    assert "no group had any reward variance in the last 2 steps" in err
    assert out.splitlines()[-1].startswith("the trainer waited 0%")
    assert out.splitlines()[-2].startswith("step 2/10")


def test_kept_warnings_are_bounded(start):
    with start(mode="disabled") as telemetry:
        for number in range(1000):
            telemetry.warn(str(number))
    assert len(telemetry.warnings) == 100


def test_a_mode_that_cannot_work_is_refused_before_anything_is_opened(start, tmp_path):
    with pytest.raises(ValueError, match="no W&B key"):
        start(mode="online")
    assert list(tmp_path.iterdir()) == []
