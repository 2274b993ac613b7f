import json
import subprocess
import sys

import pytest

from bench import record


def test_head_of_a_record(tmp_path):
    """A bench of the command line: what it writes tells how it was run, without folders."""
    program = tmp_path / "some_bench.py"
    program.write_text(
        "import sys\nfrom pathlib import Path\nfrom bench import record\n"
        "record.write(Path(sys.argv[2]), record.about('NVIDIA H200') | {'rows': [1]})\n"
    )
    out = tmp_path / "made" / "here.json"
    python = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r})"]
    python[2] += "; sys.path.insert(0, '.'); import runpy; sys.argv = ['-m', *sys.argv[1:]]"
    python[2] += "; runpy.run_module('some_bench', run_name='__main__', alter_sys=True)"
    flags = ["--out", str(out), f"--model={tmp_path / 'tiny'}", "--only", "a b", "folder/file"]
    subprocess.run([*python, *flags], check=True)
    told = json.loads(out.read_text())
    assert told["command"] == (
        "python -m some_bench --out here.json --model=tiny --only 'a b' folder/file"
    )
    assert told["device"] == "NVIDIA H200"
    assert told["rows"] == [1]
    assert list(told)[:4] == ["command", "date", "commit", "device"]
    assert [file.name for file in out.parent.iterdir()] == ["here.json"]


def test_commit_is_marked_where_files_differ(tmp_path, monkeypatch):
    monkeypatch.setattr(record, "_ROOT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert record.commit() is None
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    (tmp_path / "file").write_text("1")
    for words in (["init", "-q"], ["add", "file"], ["commit", "-qm", "bench: one"]):
        subprocess.run([*git, *words], check=True)
    clean = record.commit()
    assert clean is not None
    assert len(clean) == 12
    (tmp_path / "file").write_text("2")
    assert record.commit() == clean + "+"


@pytest.mark.parametrize(
    ("device", "name"), [(record.host(), "cpu"), ("NVIDIA H200", "nvidia_h200")]
)
def test_device_in_the_name_of_a_file(device, name):
    assert record.in_file_name(device) == name


def test_a_bench_for_gpus_ends_with_a_word_on_a_cpu(monkeypatch):
    monkeypatch.setattr(record, "jax_device", record.host)
    with pytest.raises(SystemExit, match=r"needs an NVIDIA GPU, and jax sees none\. --tiny runs"):
        record.need_gpu("--tiny runs on a CPU.")
    monkeypatch.setattr(record, "jax_device", lambda: "NVIDIA H200")
    record.need_gpu()
