import subprocess
import sys

import pytest

import asynctensorrlhf


@pytest.mark.parametrize("name", sorted(asynctensorrlhf._HOMES))
def test_every_public_part_can_be_imported_from_the_package(name):
    assert getattr(asynctensorrlhf, name).__name__ == name
    assert name in dir(asynctensorrlhf)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'Bufer'"):
        _ = asynctensorrlhf.Bufer


def test_importing_the_package_imports_nothing_heavy():
    code = "import sys, asynctensorrlhf; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
