"""The conversion itself runs with a real model in `make demo-real`."""

import pytest

from asynctensorrlhf.policy.gguf import plain_model_folder


@pytest.mark.parametrize("path", ["some/folder", "organisation/model"])
def test_folders_and_hub_ids_are_taken_as_they_are(tmp_path, path):
    assert plain_model_folder(path, tmp_path) == path


def test_a_package_that_is_not_installed_is_named_with_what_to_install(tmp_path):
    with pytest.raises(ValueError, match=r"package no_such_models is not installed.*pip install"):
        plain_model_folder("package://no_such_models/model.gguf", tmp_path)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"missing.gguf: no such file"):
        plain_model_folder(str(tmp_path / "missing.gguf"), tmp_path)


def test_a_converted_model_is_not_converted_again(tmp_path):
    source = tmp_path / "model.gguf"
    source.write_bytes(b"12345")
    (tmp_path / "converted" / "model-5").mkdir(parents=True)
    assert plain_model_folder(str(source), tmp_path / "converted") == str(tmp_path / "converted" / "model-5")


def test_packaged_files_are_found_without_importing_the_package(tmp_path, monkeypatch):
    package = tmp_path / "explosive_models"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "model.gguf").write_bytes(b"123")
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "converted" / "model-3").mkdir(parents=True)
    found = plain_model_folder("package://explosive_models/model.gguf", tmp_path / "converted")
    assert found.endswith("model-3")
