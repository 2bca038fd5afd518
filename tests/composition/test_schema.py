import pytest

from asynctensorrlhf.composition.schema import ConfigFile, Knob, Schema
from tests.composition.composing import OPTIONS, app, chosen, compose


def knobs_of(text: str, package: str = "loss") -> dict[str, Knob]:
    return {
        path: knob
        for path, knob in Schema.from_files([ConfigFile(text, package)]).knobs.items()
        if path.startswith(f"{package}.")
    }


@pytest.mark.parametrize("option", [option for option in OPTIONS if not option.startswith("experiment=")])
def test_every_key_of_every_option_has_a_rule_that_its_default_satisfies(option: str) -> None:
    group = option.partition("=")[0].replace("/", ".")
    knobs = app().schema(chosen(option), compose(*chosen(option))).knobs.values()
    own = [knob for knob in knobs if knob.path.startswith(f"{group}.") and "._" not in knob.path]
    assert [knob.path for knob in own if not knob.has_own_rule or not knob.description] == []
    given = [knob for knob in own if knob.default != "???" and "${" not in str(knob.default)]
    assert [(knob.path, knob.default) for knob in given if not knob.rule.allows(knob.default)] == []


def test_every_root_key_has_a_rule() -> None:
    root = Schema.from_files([]).knobs
    assert set(root) == {"seed", "output_dir", "resume", "dry_run"}
    assert all(knob.has_own_rule for knob in root.values())


def test_the_rule_is_the_bracket_that_ends_the_comment_block_above_the_key() -> None:
    knobs = knobs_of(
        "# A file's own comment [int].\n\n"
        "# First line (see [1])\n# second line. [float in [0, 1)]\nshare: 0.5\n"
        "plain: 3  # [str]\n"
        "nested:\n  # Inner. [int >= 1 or null]\n  deep: null\n"
    )
    assert knobs["loss.share"].rule.text == "float in [0, 1)"
    assert knobs["loss.share"].description == "First line (see [1]) second line."
    assert not knobs["loss.plain"].has_own_rule
    assert knobs["loss.nested.deep"].rule.text == "int >= 1 or null"


def test_a_key_without_a_rule_takes_the_type_of_its_default() -> None:
    knobs = knobs_of("count: 3\nscale: 1e-3\nname: x\nanything: null\nflag: true\nfree: {}\nneeded: ???\n")
    accepts = {path: knob.rule.allows for path, knob in knobs.items()}
    assert accepts["loss.count"](5)
    assert not accepts["loss.count"](5.0)
    assert accepts["loss.scale"](1)
    assert not accepts["loss.name"](1)
    assert accepts["loss.anything"]([1])
    assert not accepts["loss.flag"](1)
    assert accepts["loss.needed"]("x")


def test_an_option_that_builds_on_another_inherits_its_rules() -> None:
    base, own = ConfigFile("# Steps. [int >= 1]\nnum_steps: 3\n", "trainer"), ConfigFile("num_steps: 7\n", "trainer")
    knob = Schema.from_files([base, own]).knobs["trainer.num_steps"]
    assert (knob.rule.text, knob.default) == ("int >= 1", 7)


def test_files_outside_the_groups_declare_nothing() -> None:
    schema = Schema.from_files([ConfigFile("trainer:\n  stpes: 3\n", ""), ConfigFile("a: 1\n", "unheard_of")])
    assert not schema.knows("trainer.stpes")
    assert not schema.knows("unheard_of.a")


def test_keys_below_a_mapping_are_free() -> None:
    schema = Schema.from_files([ConfigFile("# Any. [mapping]\nkwargs: {}\n", "data")])
    assert schema.knows("data.kwargs.enable_thinking.deeper")
    assert not schema.knows("data.kwarg")
