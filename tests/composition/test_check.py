"""What a command line gets wrong is told in one line, before anything is written or loaded."""

from pathlib import Path

import pytest

from asynctensorrlhf.composition.check import resolved_config
from asynctensorrlhf.composition.hydra_app import HydraApp, own_keys, parse_arguments
from asynctensorrlhf.composition.paths import conf_dir
from asynctensorrlhf.composition.plan import PlannedJob, plan_job

OPTIONS = sorted(f"{path.parent.name}={path.stem}" for path in conf_dir().glob("*/*.yaml"))
REQUIRED = {"data=jsonl": ["data.path=x.jsonl"], "data=parquet": ["data.path=x.parquet"]}

BAD_VALUES = [
    ("optim.lr=abc", "optim.lr=abc: must be a float > 0"),
    ("optim.lr=-1", "optim.lr=-1: must be a float > 0"),
    ("optim.lr=nan", "optim.lr=nan: must be a float > 0"),
    ("optim.lr=inf", "optim.lr=inf: must be a float > 0"),
    ("optim.lr=", "optim.lr=: must be a float > 0"),
    ("optim.lr='\"1e-3\"'", "must be a float > 0"),
    ("optim.betas=[0.9]", "optim.betas=[0.9]: must be two floats in [0, 1)"),
    ("trainer.num_steps=0", "trainer.num_steps=0: must be an int >= 1"),
    ("trainer.num_steps=true", "trainer.num_steps=true: must be an int >= 1"),
    ("trainer.num_steps=null", "trainer.num_steps=null: must be an int >= 1"),
    ("trainer.num_steps=???", "trainer.num_steps=???: is required; must be an int >= 1"),
    ("trainer.num_steps=2,3", "several values; add -m"),
    ("rollout.group_size=0", "rollout.group_size=0: must be an int >= 1"),
    ("rollout.group_size=1", "use rollout.group_size >= 2"),
    ("buffer.max_staleness=-1", "buffer.max_staleness=-1: must be an int >= 0"),
    ("buffer.capacity=31", "must be >= trainer.groups_per_step=32"),
    ("trainer.minibatches_per_step=33", "must be <= trainer.groups_per_step=32"),
    ("rollout.temperature=-1", "rollout.temperature=-1: must be a float > 0"),
    ("rollout.temperature=0", "rollout.temperature=0: must be a float > 0"),
    ("rollout.stop_token_ids=[3,-2]", "rollout.stop_token_ids=[3, -2]: must be token ids >= 0"),
    ("trainer.groups_per_step=2.5", "trainer.groups_per_step=2.5: must be an int >= 1"),
    ("trainer.device=gpuu", "trainer.device=gpuu: must be a device (auto, cpu, mps, cuda, cuda:N)"),
    ("loss.clip_eps_low=1.5", "loss.clip_eps_low=1.5: must be a float in (0, 1)"),
    ("logger.name=123", "logger.name=123: must be a str or null, got the int 123; quote it twice"),
    ("seed=4294967296", "seed=4294967296: must be an int in [0, 4294967295]"),
    ("resume=auto", "add output_dir=<the folder of the run>"),
    ("resume=nowhere", "resume=nowhere: no such folder; must be auto"),
]
BAD_NAMES = [
    ("+trainer.stpes=3", "trainer.stpes=3: unknown key; did you mean trainer.num_steps?"),
    ("trainer.stpes=3", "trainer.stpes=3: unknown key; did you mean trainer.num_steps?"),
    ("rollout.num_steps=3", "rollout.num_steps=3: unknown key; did you mean trainer.num_steps?"),
    ("steps=3", "steps=3: unknown key; did you mean trainer.num_steps?"),
    ("+trainer.deep.er=3", "trainer.deep.er=3: unknown key"),
    ("loss.agregation=token_mean", "loss.agregation=token_mean: unknown key; did you mean loss.aggregation?"),
    ("loss.zzz=1", "unknown key; must be one of loss.proximal, loss.aggregation"),
    ("loss.correction=tis", "is a group, whose options are chosen otherwise; use loss/correction=tis"),
    ("loss/correction=tsi", "loss/correction=tsi: unknown option; must be one of geometric"),
    ("+reference.path=x", "reference.path=x: unknown key"),
    ("+advantage@second=group_relative", "second._target_="),
    ("loss=ppoo", "topr; did you mean ppo?"),
    ("loss=[ppo,m2po]", "takes one option, of aipo, cispo"),
    ("loss=null", "loss=null: must be one of aipo, cispo"),
    ("~loss", "loss: is missing"),
    ("~trainer.mode", "trainer.mode: is missing; must be one of async, sync"),
    ("experiment=phase1", "did you mean phase1_sync?"),
    ("trainer.num_steps", "must be written group=option or key=value"),
    ("data=jsonl", "data.path=???: is required; must be a str"),
    ("hydra.foo=1", "hydra.foo=1: unknown key"),
    ("output_dir=a/l\u00e4ufe", "quote the value twice: 'output_dir=\"a/l\u00e4ufe\"'"),
]
TEMPLATES = [
    ("data.template='${x}^2$ {question}'", "data.template=${x}^2$ {question}: a text must not refer to other keys"),
    ("data.template='${seed} {question}'", "a text must not refer to other keys"),
    ("data.template='a ${ b'", "data.template='a ${ b': malformed interpolation"),
    ("data.prompt_column=${x}", "data.prompt_column=${x}: Interpolation key 'x' not found"),
]


def plan(*overrides: str, flags: tuple[str, ...] = ()) -> PlannedJob:
    return plan_job(HydraApp(parse_arguments(flags)), overrides)


def complaint(*overrides: str) -> str:
    error = plan(*overrides).error
    assert error is not None, f"accepted {overrides}"
    return str(error)


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_composes_and_passes_the_check(option: str) -> None:
    assert plan(option, *REQUIRED.get(option, [])).error is None


@pytest.mark.parametrize(("override", "fragment"), BAD_VALUES + BAD_NAMES)
def test_a_bad_override_is_told_in_one_line_with_what_is_allowed(override: str, fragment: str) -> None:
    said = complaint(override)
    assert fragment in said
    assert "\n" not in said


@pytest.mark.parametrize(("override", "fragment"), TEMPLATES)
def test_an_interpolation_in_a_text_is_refused_with_its_key_and_the_escape(override: str, fragment: str) -> None:
    said = complaint("data=jsonl", "data.path=x", override)
    assert fragment in said
    assert r"\${" in said


@pytest.mark.parametrize("value", [".think=false", "={think: false}"])
def test_a_new_key_of_a_mapping_is_told_how_to_be_added(value: str) -> None:
    override = f"data.chat_template_kwargs{value}"
    said = complaint("data=jsonl", "data.path=x", override)
    assert said == f"{override}: a key that is new to a mapping is added with a plus: +{override}"
    assert plan("data=jsonl", "data.path=x", f"+{override}").error is None


@pytest.mark.parametrize(
    ("template", "meant"),
    [
        (r"'Solve {question} in \boxed{}'", r"Solve {question} in \boxed{}"),
        ("'Return {\"answer\": 1}. {question}'", 'Return {"answer": 1}. {question}'),
        (r"'\${x}^2$ {question}'", "${x}^2$ {question}"),
    ],
)
def test_other_characters_of_a_template_pass_through(template: str, meant: str) -> None:
    overrides = ["data=jsonl", "data.path=x", f"data.template={template}"]
    assert plan(*overrides).error is None
    assert own_keys(HydraApp(parse_arguments([])).compose(overrides)).data.template == meant


@pytest.mark.parametrize("text", ["1e-6", "1E-6", "0.000001"])
def test_scientific_notation_is_a_float(text: str) -> None:
    overrides = [f"optim.lr={text}"]
    assert plan(*overrides).error is None
    assert HydraApp(parse_arguments([])).compose(overrides).optim.lr == 1e-6


def test_yaml_of_ones_own_is_checked_with_the_shipped_rules(tmp_path: Path) -> None:
    (tmp_path / "optim").mkdir()
    (tmp_path / "optim" / "mine.yaml").write_text("defaults: [adamw]\nlr: 1e-6\nextra_name: '007'\n")
    flags = ("--config-dir", str(tmp_path))
    assert plan("optim=mine", flags=flags).error is None
    assert "optim.lr=x: must be a float > 0" in str(plan("optim=mine", "optim.lr=x", flags=flags).error)
    assert "optim.extra_name=7: must be a str" in str(plan("optim=mine", "optim.extra_name=7", flags=flags).error)


def test_a_mistyped_key_in_an_experiment_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text("# @package _global_\ntrainer: {stpes: 3}\n")
    error = plan("experiment=mine", flags=("--config-dir", str(tmp_path))).error
    assert str(error) == "trainer.stpes=3: unknown key; did you mean trainer.num_steps?"


def test_a_mask_inside_the_clip_range_is_a_warning() -> None:
    planned = plan("loss=m2po", "loss.ratio_sq_threshold=1.2")
    assert planned.error is None
    assert "loss.ratio_sq_threshold=1.2" in planned.warnings[0]
    assert plan("loss=m2po", "loss.ratio_sq_threshold=1.5").warnings == ()


def test_a_constant_norm_needs_its_divisor() -> None:
    overrides = ["loss=grpo", "loss.aggregation=seq_mean_token_sum_norm"]
    assert "loss.loss_scale must be > 0 with loss.aggregation=seq_mean_token_sum_norm" in complaint(*overrides)
    assert plan(*overrides, "loss.loss_scale=6").error is None


def test_a_used_folder_is_refused_unless_it_is_resumed(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    assert plan(f"output_dir={folder}").error is None
    folder.mkdir()
    assert plan(f"output_dir={folder}").error is None
    (folder / "config.yaml").touch()
    assert "already holds a run; add resume=auto" in complaint(f"output_dir={folder}")
    assert plan(f"output_dir={folder}", "resume=auto").error is None
    assert "is a file" in complaint(f"output_dir={folder / 'config.yaml'}")


def test_what_comes_from_the_environment_stays_out_of_resolved_configs_and_messages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ATRLHF_TEST_VALUE", "made-up-123")
    overrides = ["logger.name='${oc.env:ATRLHF_TEST_VALUE}'", "logger.project='${logger.name}'"]
    resolved = resolved_config(own_keys(HydraApp(parse_arguments([])).compose(overrides)))
    assert resolved["logger"]["name"] == "${oc.env:ATRLHF_TEST_VALUE}"
    assert "made-up-123" not in str(resolved)
    assert resolved["engine"]["dtype"] == "float32"
    assert "made-up-123" not in complaint("optim.lr='${oc.env:ATRLHF_TEST_VALUE}'")


def test_workers_that_a_synchronous_run_leaves_idle_are_a_warning() -> None:
    assert "only one of them" in plan("trainer.mode=sync", "rollout.num_workers=2").warnings[0]
    assert plan("trainer.mode=sync").warnings == ()
    assert plan("rollout.num_workers=2").warnings == ()
