"""Files that survive a crash."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sparring import files


def test_written_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    files.write_whole(path, b"first")

    def full(part, path):
        raise OSError(errno.ENOSPC, "no room")

    monkeypatch.setattr(os, "replace", full)
    for options in ({}, {"sync": True}, {"shared": True}):
        with pytest.raises(OSError, match=r"no room: .*a\.json"):
            files.write_whole(path, b"second", **options)
    assert path.read_bytes() == b"first"
    assert os.listdir(tmp_path) == ["a.json"], "nothing is left of what failed"


def test_pieces_take_a_files_place_at_the_end(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("first")

    def interrupted():
        with files.replacing(path) as new, new.open("w") as file:
            file.write("sec")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert path.read_text() == "first"
    assert os.listdir(tmp_path) == ["a.csv"], "nothing is left of what failed"
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "a.csv.new").symlink_to(victim)
    with files.replacing(path) as new, new.open("w") as file:
        file.write("sec")
        assert path.read_text() == "first"
        file.write("ond")
    assert path.read_text() == "second"
    assert victim.read_text() == "precious"
    assert not path.is_symlink()


def test_several_write_one_file(tmp_path):
    """What one has not finished never takes the file's place, whoever else ends meanwhile."""
    path = tmp_path / "a.csv"
    with files.replacing(path) as slow, slow.open("w") as file:
        file.write("half")
        with files.replacing(path) as new, new.open("w") as other:
            other.write("whole")
        files.write_whole(path, b"shared", shared=True)
        assert path.read_bytes() == b"shared"
        file.write(" and half")
    assert path.read_text() == "half and half"
    assert os.listdir(tmp_path) == ["a.csv"]


def test_directories_are_made_only_when_asked(tmp_path):
    """A run that was deleted while it is written does not come back as a torso."""
    with pytest.raises(FileNotFoundError):
        files.write_whole(tmp_path / "gone" / "a", b"x")
    files.write_whole(tmp_path / "new" / "deep" / "a", b"x", parents=True, sync=True)
    assert (tmp_path / "new" / "deep" / "a").read_bytes() == b"x"


def test_create_and_write_new_never_replace(tmp_path):
    path = tmp_path / "token"
    assert files.create(path, b"one", 0o600)
    assert not files.create(path, b"two")
    assert path.read_bytes() == b"one"
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(FileExistsError):
        files.write_new(path, b"three")


def test_append_and_replace_directory(tmp_path):
    files.append(tmp_path / "log", b"a\n")
    files.append(tmp_path / "log", b"b\n")
    assert (tmp_path / "log").read_bytes() == b"a\nb\n"
    place, new, old = (tmp_path / name for name in ("it", "it.new", "it.old"))
    for content in ("1", "2", "3"):
        new.mkdir()
        (new / "x").write_text(content)
        files.replace_directory(place, new, old)
    assert (place / "x").read_text() == "3"
    assert (old / "x").read_text() == "2"
    assert not new.exists()


def test_a_lock_ends_with_its_process(tmp_path):
    code = "import sys; from pathlib import Path; from sparring import files\n"
    code += "with files.locked(Path(sys.argv[1]), wait=False) as ours: print(ours, flush=True); sys.stdin.read()"
    argv = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "True\n"
        with files.locked(tmp_path, wait=False) as ours:
            assert not ours
        other.kill()
        other.wait()
    with files.locked(tmp_path, wait=True) as ours:
        assert ours


def test_it_loads_nothing(tmp_path: Path):
    code = "import sys; before = set(sys.modules); import sparring.files; print(*sys.modules.keys() - before)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"numpy", "msgspec", "jax"} & set(found)


def test_a_planted_link_is_not_followed(tmp_path: Path):
    victim, path = tmp_path / "victim", tmp_path / "a.json"
    victim.write_bytes(b"precious")
    (tmp_path / "a.json.new").symlink_to(victim)
    files.write_whole(path, b"ours")
    assert victim.read_bytes() == b"precious"
    assert path.read_bytes() == b"ours"
    assert not path.is_symlink()


def test_a_figure_follows_no_link(tmp_path: Path):
    class Figure:
        def savefig(self, out, dpi, format):
            out.write(f"{format} {dpi}".encode())

    victim, path = tmp_path / "victim", tmp_path / "a.PNG"
    victim.write_bytes(b"precious")
    path.symlink_to(victim)
    files.save_figure(Figure(), path, 90)
    assert victim.read_bytes() == b"precious"
    assert path.read_bytes() == b"png 90"
    assert not path.is_symlink()
