"""A digest of all code, which is another one for every change of it."""

from serving.runtime import code_files
from serving.runtime.code_files import code_digest


def test_a_digest_is_of_this_code():
    assert len(code_digest()) == 64
    assert "runtime/code_files.py" in list(code_files._code_files("serving"))


def test_a_digest_of_code_names_every_file_and_what_is_in_it(monkeypatch, tmp_path):
    package = tmp_path / "some_package"
    (package / "inner").mkdir(parents=True)
    for name in ("__init__.py", "inner/kernel.cu", "inner/tuned.json"):
        (package / name).write_text("1\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(code_files, "_PACKAGES", ("some_package", "no_such_package"))
    digest = code_digest.__wrapped__
    seen = [digest()]
    (package / "inner" / "notes.md").write_text("no code\n")
    assert digest() == seen[0]
    (package / "inner" / "kernel.cu").write_text("2\n")
    seen.append(digest())
    (package / "inner" / "tuned.json").rename(package / "tuned.json")
    seen.append(digest())
    assert len(set(seen)) == 3
