"""The text around a plain prompt.

Knows one placeholder; every other brace, dollar sign and backslash means itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Template:
    """What stands before and after the prompt."""

    before: str
    after: str

    def fill(self, prompt: str) -> str:
        """The prompt in its place, as it is: its own braces are not looked at."""
        return self.before + prompt + self.after


def load_template(*, template: str | None, template_file: str | None, prompt_column: str) -> Template | None:
    """The template of `data.template` or of the file `data.template_file`; None when neither is given.

    A file is taken as it is, its last newline included; only a byte order mark is removed.

    Raises:
        ValueError: both are given, the file can't be read, or `{<prompt_column>}` doesn't occur exactly once.
    """
    if template is not None and template_file is not None:
        raise ValueError("data.template and data.template_file are both given: keep one")
    key = "data.template"
    if template_file is not None:
        key, template = "data.template_file", _read(template_file)
    if template is None:
        return None
    placeholder = f"{{{prompt_column}}}"
    if (found := template.count(placeholder)) != 1:
        raise ValueError(
            f"{key} must hold {placeholder} (data.prompt_column) exactly once, found {found} in {template!r}"
        )
    before, _, after = template.partition(placeholder)
    return Template(before, after)


def _read(path: str) -> str:
    try:
        return Path(path).read_bytes().decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"data.template_file must be a readable UTF-8 text, got {path!r}: {error}") from error
