import pytest

from asynctensorrlhf.composition.rules import parse_rule

CASES = [
    ("int >= 1", [1, 10**12], [0, -1, 2.5, "2", True, None, [1]]),
    ("float > 0", [1e-300, 1, 2.5], [0, 0.0, -1, float("nan"), float("inf"), "1.5", True, None]),
    ("float in (0, 1)", [0.5], [0, 1, 1.5]),
    ("float in [0, 1)", [0, 0.99], [1, -0.01]),
    ("float in [0, 1]", [0, 1], [1.0001]),
    ("float <= 1e-3", [1e-3, -5], [0.002]),
    ("bool", [True, False], [0, 1, "true", None]),
    ("str", ["", "007", "null"], [7, None, True]),
    ("str or null", ["x", None], [7]),
    ("list of int", [[], [1, 2]], [[1, 2.0], [True], 1, ["1"]]),
    ("list of float", [[0.9, 1]], [[float("nan")], ["0.9"]]),
    ("list or null", [[1, "a"], None], ["a"]),
    ("mapping", [{}, {"a": 1}], [[], None]),
    ("device", ["auto", "cpu", "mps", "cuda", "cuda:3"], ["gpuu", "cuda:", "cuda:x", 0, None]),
    ("one of a, b, none", ["a", "none"], ["c", None, ""]),
    ("one of a, b or null", ["a", None], ["null"]),
    ("int >= 1 or auto", [3, "auto"], [0, "automatic", None]),
]


@pytest.mark.parametrize(("text", "allowed", "refused"), CASES, ids=[case[0] for case in CASES])
def test_a_rule_takes_what_it_says_and_nothing_else(text: str, allowed: list[object], refused: list[object]) -> None:
    rule = parse_rule(text)
    assert rule is not None
    assert [value for value in allowed if not rule.allows(value)] == []
    assert [value for value in refused if rule.allows(value)] == []


@pytest.mark.parametrize("text", ["1", "eq. 7", "int => 1", "float in 0, 1", "int >= x", "str or something else"])
def test_what_is_no_rule_is_not_taken_for_one(text: str) -> None:
    assert parse_rule(text) is None
