"""Checkpoints in shards: what is written and read, by one process here; several do so in test_sharding.py."""

import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import Metadata

from config.errors import UserError
from engine import checkpoint as checkpoints
from engine.checkpoint import load_checkpoint, save_checkpoint
from engine.shards import mapped, tensors_of, write_shards
from tests.conftest import TINY, assert_clean_error, run_sample, run_train
from tests.several import in_shards

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture
def shared_run(char_run: Path, tmp_path: Path) -> Path:
    """A run whose checkpoint lies in shards, as several processes write it."""
    shutil.copytree(char_run, tmp_path / "run")
    (tmp_path / "run/best.pt").unlink()
    in_shards(tmp_path / "run/last.pt")
    return tmp_path / "run"


def test_every_tensor_comes_back_in_its_place_and_everything_else_as_it_was(shared_run: Path, char_run: Path) -> None:
    one, other = (load_checkpoint(run / "last.pt", lazily=False) for run in (char_run, shared_run))
    assert one.keys() == other.keys()
    ours, theirs = tensors_of(one), tensors_of(other)
    assert list(ours) == list(theirs) and len(ours) > 20
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype and torch.equal(tensor, theirs[name]), name
    nothing = lambda _, tensor: None  # noqa: E731
    assert mapped(one, nothing) == mapped(other, nothing)


def test_types_are_kept(shared_run: Path) -> None:
    path = shared_run / "last.pt"
    content = load_checkpoint(path, lazily=False)
    made = {
        "narrow": torch.randn(3, 5).bfloat16(),
        "wide": torch.randn(2, dtype=torch.float64),
        "whole": torch.arange(4),
    }
    torch.save(write_shards(path, {**content, "made": made}, in_use=None), path)
    back = load_checkpoint(path, lazily=False)["made"]
    for name, tensor in made.items():
        assert back[name].dtype == tensor.dtype and torch.equal(back[name], tensor), name


def test_sampling_reads_the_weights_alone(shared_run: Path, char_run: Path) -> None:
    content = load_checkpoint(shared_run / "last.pt")
    assert not any(tensor.is_meta for tensor in tensors_of(content["model"]).values())
    states = [tensor for tensor in tensors_of(content["optimizer"]).values() if tensor.dim()]
    assert states and all(tensor.is_meta for tensor in states)
    options = ("--max_new_tokens=30", "--prompt=Line")
    sampled, expected = run_sample(f"--out_dir={shared_run}", *options), run_sample(f"--out_dir={char_run}", *options)
    assert sampled.status == 0 and sampled.stdout == expected.stdout, sampled.stderr


def test_a_run_goes_on_from_shards_in_one_process(shared_run: Path, char_run: Path, char_data: Path) -> None:
    straight = shared_run.parent / "straight"
    shutil.copytree(char_run, straight)
    for run in (straight, shared_run):
        outcome = run_train(f"--out_dir={run}", "--resume", "--max_iters=152", "--report=false")
        assert outcome.status == 0, outcome.stderr
    one, other = (load_checkpoint(run / "last.pt", lazily=False)["model"] for run in (straight, shared_run))
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert not list(shared_run.glob("*.shards-*")), "one file needs no shards"


class Evil:
    """Its pickle writes a file where it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (os.mkdir, (str(self.path),))


def describe_evil(shards: Path) -> None:
    (shards / ".metadata").write_bytes(pickle.dumps(Evil(shards.parent / "evil")))


def change_a_class(shards: Path) -> None:
    """PurePath.with_name = PurePath, for the whole program."""
    state = b"(dX\x09\x00\x00\x00with_namecpathlib\nPurePosixPath\nsb"
    (shards / ".metadata").write_bytes(b"cpathlib\nPurePosixPath\n" + state + b".")


def change_a_description(shards: Path) -> None:
    state = b"(dX\x01\x00\x00\x00xK\x01sb"
    (shards / ".metadata").write_bytes(b"ctorch.distributed.checkpoint.metadata\nMetadata\n" + state + b".")


def change_a_function(shards: Path) -> None:
    state = b"(dX\x01\x00\x00\x00xK\x01sb"
    (shards / ".metadata").write_bytes(b"ctorch.serialization\n_get_layout\n" + state + b".")


def leave_out_a_part(shards: Path) -> None:
    metadata = pickle.loads((shards / ".metadata").read_bytes())
    next(iter(metadata.state_dict_metadata.values())).chunks.clear()
    (shards / ".metadata").write_bytes(pickle.dumps(metadata))


def point_elsewhere(shards: Path) -> None:
    text = (shards / ".metadata").read_bytes()
    name = b"__0_0.distcp"
    assert name in text
    (shards / ".metadata").write_bytes(text.replace(name, b"../x0.distcp"))
    shutil.copy(shards / "__0_0.distcp", shards.parent / "x0.distcp")


def cut_off(shards: Path) -> None:
    path = shards / "__0_0.distcp"
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 10].ljust(len(content), b"\0"))


def claim_more(shards: Path) -> None:
    path = shards.parent / "last.pt"
    content = torch.load(path, weights_only=True)
    content["model"]["token_embedding.weight"] = torch.empty(10**9, 10**4, device="meta")
    torch.save(content, path)


def claim_another_shape(shards: Path) -> None:
    path = shards.parent / "last.pt"
    content = torch.load(path, weights_only=True)
    content["model"]["token_embedding.weight"] = content["model"]["token_embedding.weight"][:-1]
    torch.save(content, path)


def name_another_folder(shards: Path) -> None:
    path = shards.parent / "last.pt"
    torch.save({**torch.load(path, weights_only=True), "shards": f"../run/{shards.name}"}, path)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (shutil.rmtree, "last.shards-a is missing"),
        (lambda shards: (shards / ".metadata").unlink(), "last.shards-a"),
        (describe_evil, "asks for posix.mkdir"),
        (change_a_class, "last.shards-a"),
        (change_a_description, "changes what is not its own"),
        (change_a_function, "changes what is not its own"),
        (leave_out_a_part, "is not of a whole tensor"),
        (point_elsewhere, "names '../x0.distcp'"),
        (cut_off, "last.shards-a"),
        (claim_more, "holds less than the 40,000,"),
        (claim_another_shape, "ize mismatch"),
        (name_another_folder, "are said to be in '../run/last.shards-a'"),
    ],
)
def test_K08_damaged_shards_are_refused_and_run_no_code(damage: Any, words: str, shared_run: Path) -> None:
    damage(shared_run / "last.shards-a")
    assert_clean_error(run_sample(f"--out_dir={shared_run}"), "last.pt: its numbers cannot be read", words)
    assert not (shared_run / "evil").exists()
    assert Path("there/last.pt").with_name("here") == Path("there/here")
    assert not hasattr(Metadata, "x")


@pytest.mark.parametrize("part", ["model", "optimizer"])
def test_K08_tensors_without_numbers_that_lie_nowhere_are_refused(part: str, char_run: Path, here: Path) -> None:
    content = load_checkpoint(char_run / "last.pt", lazily=False)
    content[part] = mapped(content[part], lambda _, tensor: torch.empty_like(tensor, device="meta"))
    (here / "run").mkdir()
    torch.save(content, here / "run/last.pt")
    for outcome in (run_sample("--out_dir=run"), run_train("--out_dir=run", "--resume")):
        assert_clean_error(outcome, "last.pt: its numbers cannot be read, it names no shards for them")


def test_the_checkpoint_of_another_name_is_a_clean_error(shared_run: Path) -> None:
    (shared_run / "last.pt").rename(shared_run / "best.pt")
    outcome = run_train(f"--out_dir={shared_run}", "--resume")
    assert_clean_error(outcome, "no such checkpoint")
    assert_clean_error(run_sample(f"--out_dir={shared_run}"), "best.pt", "said to be in 'last.shards-a'")
    assert (shared_run / "last.shards-a").is_dir(), "it may be named as it was"


def test_a_damaged_checkpoint_does_not_keep_the_next_one_from_being_saved(
    shared_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = load_checkpoint(shared_run / "last.pt", lazily=False)
    (shared_run / "last.pt").write_bytes(b"damaged")
    monkeypatch.setattr(checkpoints, "are_shared", lambda content: True)
    save_checkpoint(shared_run / "last.pt", content)
    assert load_checkpoint(shared_run / "last.pt")["shards"] == "last.shards-b"


def test_a_lost_process_is_not_taken_for_a_full_disk(shared_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*args: Any) -> None:
        raise torch.distributed.DistNetworkError("Connection closed by peer")

    content = load_checkpoint(shared_run / "last.pt", lazily=False)
    monkeypatch.setattr(checkpoints, "are_shared", lambda content: True)
    monkeypatch.setattr(checkpoints, "write_shards", lost)
    with pytest.raises(torch.distributed.DistNetworkError):
        save_checkpoint(shared_run / "last.pt", content)


def test_T20_a_disk_that_is_full_leaves_the_earlier_shards_and_no_others(
    shared_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch.distributed.checkpoint as dcp

    before = load_checkpoint(shared_run / "last.pt", lazily=False)

    def full(self: Any, *args: Any) -> Any:
        (Path(self.path) / "__0_0.distcp").write_bytes(b"the beginning")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(dcp.FileSystemWriter, "write_data", full)
    monkeypatch.setattr(checkpoints, "are_shared", lambda content: True)
    with pytest.raises(UserError, match=r"No space left on device.*earlier checkpoint there is intact"):
        save_checkpoint(shared_run / "last.pt", {**before, "step": 999})
    after = load_checkpoint(shared_run / "last.pt", lazily=False)
    assert after["step"] == before["step"] != 999
    assert [path.name for path in shared_run.glob("*.shards-*")] == ["last.shards-a"]


def test_K08_shards_go_to_the_folder_that_is_not_in_use_and_the_other_goes_when_all_is_written(
    shared_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, content = shared_run / "last.pt", load_checkpoint(shared_run / "last.pt", lazily=False)
    # Killed between the shards and the file that names them.
    write_shards(path, content, in_use=shared_run / "last.shards-a")
    assert sorted(folder.name for folder in shared_run.glob("*.shards-*")) == ["last.shards-a", "last.shards-b"]
    assert load_checkpoint(path)["shards"] == "last.shards-a"
    # The next run removes what nobody needs, and keeps the rest.
    outcome = run_train(f"--out_dir={shared_run}", "--resume", "--max_iters=150", *TINY)
    assert "nothing to do" in outcome.stdout, outcome.stderr
    assert [folder.name for folder in shared_run.glob("*.shards-*")] == ["last.shards-a"]
    monkeypatch.setattr(checkpoints, "are_shared", lambda content: True)
    for letter in "bab":
        save_checkpoint(path, content)
        assert [folder.name for folder in shared_run.glob("*.shards-*")] == [f"last.shards-{letter}"]
        assert load_checkpoint(path)["step"] == content["step"]


def test_a_damaged_file_keeps_the_shards_beside_it(shared_run: Path, char_data: Path) -> None:
    """Somebody may still want to save what is in them."""
    (shared_run / "last.pt").write_bytes(b"damaged")
    assert_clean_error(run_train(f"--out_dir={shared_run}", "--resume"), "cannot be read as a checkpoint")
    assert (shared_run / "last.shards-a").is_dir()
