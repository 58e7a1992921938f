"""The versions of a repository: the link that names one of them, and what is removed and what never is."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from model.args import ModelArgs
from model.checkpoint.manifest import FileRecord, Manifest, SourceRecord, write_manifest
from model.checkpoint.versions import Versions
from model.errors import InputError, RunError
from tests.checkpoints import tree_bytes

REPO = "org/tiny"
COMMITS = [letter * 40 for letter in "abcdef"]
SHARD = "model0-mp1.safetensors"


@pytest.fixture
def versions(tmp_path):
    return Versions(tmp_path / "root", REPO, mp=1, weights="fp8")


def publish(versions: Versions, commit: str, written: int, /, **differing: str) -> Path:
    """A finished version with three bytes of shard, whose manifest was written at second ``written``."""
    directory = versions.directory(commit)
    directory.mkdir(parents=True)
    (directory / SHARD).write_bytes(b"abc")
    fields = {"repo": versions.repo, "commit": commit, "weights": versions.weights, "mtp": versions.mtp} | differing
    write_manifest(
        directory,
        Manifest(
            source=SourceRecord(fields["repo"], fields["commit"], ()),
            args=ModelArgs(),
            mp=1,
            weights=fields["weights"],
            mtp=fields["mtp"],
            files=(FileRecord(SHARD, 3, "0" * 64, 1),),
            dropped=(),
        ),
    )
    os.utime(directory / "manifest.json", (written, written))
    return directory


def commits_in(versions: Versions) -> list[str]:
    """The first letters of all commits that have something there."""
    return sorted(place.name[0] for place in versions.home.iterdir() if len(place.name) == 40)


def test_latest_names_the_version_relatively_and_is_swapped_in_one_step(versions, monkeypatch):
    assert versions.current() is None
    first, second = (publish(versions, commit, written) for written, commit in enumerate(COMMITS[:2]))
    assert versions.make_current(COMMITS[0]) == first
    assert versions.link.readlink() == Path(COMMITS[0], "mp1-fp8")
    assert versions.link.resolve() == first.resolve()

    seen = []
    really = Path.replace

    def replace(self, target):
        seen.append(target.readlink())
        return really(self, target)

    monkeypatch.setattr(Path, "replace", replace)
    versions.make_current(COMMITS[1])
    assert seen == [Path(COMMITS[0], "mp1-fp8")], "latest was not there until the moment in which it was replaced"
    assert versions.current() == second
    assert {path.name for path in versions.home.iterdir()} == {*COMMITS[:2], "latest", ".lock"}


def test_a_swap_that_dies_leaves_the_old_link_and_does_not_stand_in_the_way(versions, monkeypatch):
    for written, commit in enumerate(COMMITS[:2]):
        publish(versions, commit, written)
    versions.make_current(COMMITS[0])
    with monkeypatch.context() as broken:
        broken.setattr(Path, "replace", lambda self, target: (_ for _ in ()).throw(OSError(5, "Input/output error")))
        with pytest.raises(RunError, match="latest: Input/output error; see to the storage"):
            versions.make_current(COMMITS[1])
    assert versions.current() == versions.directory(COMMITS[0])
    versions.make_current(COMMITS[1])
    assert versions.current() == versions.directory(COMMITS[1])


def damage_manifest(directory: Path) -> None:
    (directory / "manifest.json").write_text("{")


@pytest.mark.parametrize(
    "damage",
    [
        lambda directory: (directory / "manifest.json").unlink(),
        lambda directory: (directory / SHARD).unlink(),
        lambda directory: (directory / SHARD).write_bytes(b"ab"),
        damage_manifest,
        shutil.rmtree,
    ],
    ids=["no manifest", "no shard", "short shard", "damaged manifest", "nothing"],
)
def test_what_is_not_finished_neither_becomes_nor_stays_current(versions, damage):
    publish(versions, COMMITS[0], 0)
    damaged = publish(versions, COMMITS[1], 1)
    versions.make_current(COMMITS[1])
    damage(damaged)
    assert versions.current() is None
    versions.make_current(COMMITS[0])
    with pytest.raises(RunError, match=f"{damaged}: is not a finished checkpoint of {COMMITS[1]}; latest stays"):
        versions.make_current(COMMITS[1])
    assert versions.current() == versions.directory(COMMITS[0])


@pytest.mark.parametrize("field", [{"repo": "org/other"}, {"commit": COMMITS[3]}, {"weights": "bf16"}])
def test_a_checkpoint_of_something_else_is_no_version(versions, field):
    publish(versions, COMMITS[0], 0, **field)
    assert not versions.is_finished(COMMITS[0])


def test_the_newest_are_kept_whatever_their_commits_are_called(versions):
    for written, commit in zip([30, 10, 40, 20], COMMITS[:4], strict=True):
        publish(versions, commit, written)
    versions.make_current(COMMITS[2])
    removed = versions.remove_old(2)
    assert removed == [versions.directory(COMMITS[3]), versions.directory(COMMITS[1])]
    assert commits_in(versions) == ["a", "c"]
    assert versions.remove_old(2) == []
    assert {path.name for path in versions.home.iterdir()} == {COMMITS[0], COMMITS[2], "latest", ".lock"}


@pytest.mark.parametrize(("keep", "left"), [(1, "a"), (2, "ad"), (3, "acd"), (9, "abcd")])
def test_latest_is_one_of_those_kept_though_it_is_the_oldest(versions, keep, left):
    for written, commit in enumerate(COMMITS[:4]):
        publish(versions, commit, written)
    versions.make_current(COMMITS[0])
    versions.remove_old(keep)
    assert commits_in(versions) == list(left)
    assert versions.current() == versions.directory(COMMITS[0])


def test_nothing_but_versions_is_removed(versions):
    for written, commit in enumerate(COMMITS[:3]):
        publish(versions, commit, written)
    versions.make_current(COMMITS[2])
    home, elsewhere = versions.home, versions.root / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "precious").write_text("mine")
    (home / COMMITS[0] / "mp1-fp8.work").mkdir()
    (home / COMMITS[0] / "mp1-fp8.work" / "download").write_text("of a run")
    (home / "notes.txt").write_text("mine")
    (home / "tmp" / "mp1-fp8").mkdir(parents=True)
    (home / "tmp" / "mp1-fp8" / "manifest.json").write_text("{}")
    (home / COMMITS[3] / "mp1-fp8").mkdir(parents=True)
    (home / COMMITS[3] / "mp1-fp8" / "by-hand").write_text("no manifest")
    (home / COMMITS[4]).symlink_to(elsewhere)
    (home / COMMITS[5]).mkdir()
    (home / COMMITS[5] / "mp1-fp8").symlink_to(elsewhere)
    publish(Versions(versions.root, REPO, mp=1, weights="bf16"), COMMITS[1], 0)
    before = tree_bytes(versions.root)
    assert versions.remove_old(1) == [versions.directory(COMMITS[1]), versions.directory(COMMITS[0])]
    gone = {f"org/tiny/{commit}/mp1-fp8/{name}" for commit in COMMITS[:2] for name in (SHARD, "manifest.json")}
    assert before.keys() - tree_bytes(versions.root).keys() == gone
    assert (home / COMMITS[4]).is_symlink()
    assert (home / COMMITS[5] / "mp1-fp8").is_symlink()


def test_nothing_is_removed_while_latest_names_no_finished_version(versions):
    for written, commit in enumerate(COMMITS[:3]):
        publish(versions, commit, written)
    assert versions.remove_old(1) == []
    versions.make_current(COMMITS[0])
    shutil.rmtree(versions.directory(COMMITS[0]))
    assert versions.remove_old(1) == []
    assert commits_in(versions) == ["a", "b", "c"]


def test_an_interrupted_removal_leaves_nothing_that_looks_like_a_version(versions, monkeypatch):
    for written, commit in enumerate(COMMITS[:3]):
        publish(versions, commit, written)
    versions.make_current(COMMITS[2])

    def interrupted(place, *arguments, **options):
        next(place.rglob(SHARD)).unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", interrupted)
        with pytest.raises(KeyboardInterrupt):
            versions.remove_old(1)
    assert commits_in(versions) == ["c"]
    assert (versions.home / ".removing").exists()
    assert versions.remove_old(1) == []
    assert {path.name for path in versions.home.iterdir()} == {COMMITS[2], "latest", ".lock"}


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (f"{COMMITS[0]}/mp2-fp8", f"names {COMMITS[0]}/mp2-fp8, but this run makes mp1-fp8; choose another root"),
        (f"{COMMITS[0]}/mp1-bf16", f"names {COMMITS[0]}/mp1-bf16, but this run makes mp1-fp8; choose another root"),
        ("/somewhere/else", "points to /somewhere/else, not to a version"),
        (f"../{COMMITS[0]}/mp1-fp8", "not to a version"),
        (None, "is no symbolic link, not to a version"),
    ],
)
def test_a_latest_of_something_else_is_refused_and_left_alone(versions, target, message):
    publish(versions, COMMITS[0], 0)
    if target is None:
        versions.link.mkdir()
    else:
        versions.link.symlink_to(target)
    for refuse in (versions.check, versions.current, lambda: versions.make_current(COMMITS[0])):
        with pytest.raises(InputError, match=message):
            refuse()
    with pytest.raises(InputError, match=message):
        versions.remove_old(1)
    assert versions.link.is_dir() if target is None else versions.link.readlink() == Path(target)
    assert versions.is_finished(COMMITS[0])


def test_a_latest_with_other_mtp_layers_is_refused(versions):
    publish(versions, COMMITS[0], 0)
    versions.make_current(COMMITS[0])
    keeping = Versions(versions.root, REPO, mp=1, weights="fp8", mtp="keep")
    with pytest.raises(InputError, match="made with mtp drop; this run asks for keep: choose another root"):
        keeping.check()


TAKE_TURNS = """
import sys
from pathlib import Path
from model.checkpoint.versions import Versions
from model.errors import RunError
versions, commits = Versions(Path(sys.argv[1]), "org/tiny", mp=1, weights="fp8"), sys.argv[2:]
print("ready", flush=True)
sys.stdin.readline()
for commit in commits:
    versions.make_current(commit)
    versions.remove_old(4)
print("done", flush=True)
"""


def begin_turns(versions: Versions, commits: list[str]) -> subprocess.Popen:
    command = [sys.executable, "-c", TAKE_TURNS, str(versions.root), *commits]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    return process


def test_two_runs_at_once_never_show_a_reader_an_unfinished_version(versions):
    for written, commit in enumerate(COMMITS):
        publish(versions, commit, written)
    versions.make_current(COMMITS[5])
    turns = [begin_turns(versions, commits * 40) for commits in ([COMMITS[5], COMMITS[4]], [COMMITS[3], COMMITS[4]])]
    for process in turns:
        process.stdin.write("go\n")
        process.stdin.flush()
    while any(process.poll() is None for process in turns):
        assert (versions.link.resolve() / SHARD).read_bytes() == b"abc"
    for process in turns:
        assert (process.wait(), process.stdout.read()) == (0, "done\n")
        process.stdin.close()
        process.stdout.close()
    assert commits_in(versions) == ["c", "d", "e", "f"]


@pytest.mark.long
def test_killed_at_any_moment_latest_names_a_finished_version(versions):
    for round_ in range(15):
        for written, commit in enumerate(COMMITS):
            if not versions.is_finished(commit):
                publish(versions, commit, written)
        process = begin_turns(versions, COMMITS[2:] * 200)
        process.stdin.write("go\n")
        process.stdin.flush()
        time.sleep(0.004 * round_)
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdin.close()
        process.stdout.close()
        if os.path.lexists(versions.link):
            assert versions.current() is not None
        for commit in COMMITS:
            assert versions.is_finished(commit) or not versions.directory(commit).exists()
