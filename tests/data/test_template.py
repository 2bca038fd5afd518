import pytest

from asynctensorrlhf.data.template import load_template

QUESTION = "2{x} + \\frac{1}{2} {question}"


@pytest.mark.parametrize("from_file", [False, True])
@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("Solve {question} in \\boxed{}", f"Solve {QUESTION} in \\boxed{{}}"),
        ('Return {"answer": 1}. {question}', f'Return {{"answer": 1}}. {QUESTION}'),
        ("${x}^2$ {question}\r\n", f"${{x}}^2$ {QUESTION}\r\n"),
        ("{{question}} %s {0} \\1", f"{{{QUESTION}}} %s {{0}} \\1"),
    ],
)
def test_only_the_placeholder_is_replaced_once(tmp_path, template, expected, from_file):
    keys = {"template": template, "template_file": None}
    if from_file:
        (tmp_path / "t.txt").write_bytes(b"\xef\xbb\xbf" + template.encode())
        keys = {"template": None, "template_file": str(tmp_path / "t.txt")}
    assert load_template(**keys, prompt_column="question").fill(QUESTION) == expected


def test_the_placeholder_has_the_name_of_the_prompt_column():
    template = load_template(template="{prompt} {q.x}", template_file=None, prompt_column="q.x")
    assert template.fill("1") == "{prompt} 1"


def test_no_template_is_none():
    assert load_template(template=None, template_file=None, prompt_column="q") is None


@pytest.mark.parametrize("text", ["Solve it.", "{question} and {question}", ""])
def test_a_template_without_exactly_one_placeholder_is_refused(tmp_path, text):
    with pytest.raises(ValueError, match=r"^data\.template must hold \{question\}"):
        load_template(template=text, template_file=None, prompt_column="question")
    (tmp_path / "t.txt").write_text(text)
    with pytest.raises(ValueError, match=r"^data\.template_file must hold \{question\}"):
        load_template(template=None, template_file=str(tmp_path / "t.txt"), prompt_column="question")


def test_two_templates_are_refused():
    with pytest.raises(ValueError, match=r"data\.template and data\.template_file are both given"):
        load_template(template="{q}", template_file="t.txt", prompt_column="q")


def test_an_unreadable_template_file_names_its_key(tmp_path):
    (tmp_path / "latin").write_bytes(b"caf\xe9 {q}")
    for name in ("missing", "latin"):
        with pytest.raises(ValueError, match=rf"data\.template_file must be a readable UTF-8 text.*{name}"):
            load_template(template=None, template_file=str(tmp_path / name), prompt_column="q")
