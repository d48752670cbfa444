"""Files from strangers: thousands of damaged ones, each of which must load or end in a clean error.

python -m tests.fuzz FOLDER COUNT SEED     prints what came of them, as JSON
"""

import contextlib
import copy
import faulthandler
import io
import json
import random
import resource
import shutil
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import train
from config.command_line import checked, read_given
from config.errors import UserError
from config.preparation import PrepareSettings
from config.schema import TrainSettings
from data.dataset import PreparedData
from data.preparation import prepare
from data.sources import open_source
from engine.checkpoint import load_checkpoint, model_from_checkpoint, tokenizer_from_checkpoint
from engine.device import resident_memory
from engine.optimizer import make_optimizer
from engine.run import Run, settings_to_resume
from tests.conftest import TEXT, TINY
from tests.several import in_shards

SECONDS_FOR_ONE = 20  # then the process is ended with a traceback, as a file that hangs it would deserve
ADDRESS_SPACE = 16 << 30
ODD_VALUES: list[Any] = [
    None, True, False, -1, 0, 1, 3, 255, 2**16, 2**31, 2**63, 10**30, 0.5, -1.5, float("nan"), float("inf"), "", "x",
    "\0", "char", "bpe", "gpt2", "a\ud800b", "é" * 500, "(" * 50, "(?:a+)+$", "/etc/passwd", "../..",
    [], [1], {}, {"x": 1},
]  # fmt: skip
ODD_TENSORS: list[Callable[[], torch.Tensor]] = [
    lambda: torch.zeros(0),
    lambda: torch.zeros(1).expand(10**12),
    lambda: torch.full((16, 16), float("nan")),
    lambda: torch.zeros(16, 16, dtype=torch.int64),
    lambda: torch.zeros(16, 16, dtype=torch.complex64),
    lambda: torch.zeros(3, 3, 3, dtype=torch.bfloat16),
    lambda: torch.eye(4).to_sparse(),
]


def damaged_bytes(content: bytes, rng: random.Random) -> bytes:
    """Flipped, cut, doubled, overwritten or inserted bytes, once or several times."""
    data = bytearray(content)
    for _ in range(rng.choice((1, 1, 2, 5, 20))):
        at, length = rng.randrange(len(data) + 1), rng.choice((1, 1, 2, 8, 64, 1000))
        how = rng.randrange(6)
        if how == 0 and at < len(data):
            data[at] ^= 1 << rng.randrange(8)
        elif how == 1:
            del data[at : at + length]
        elif how == 2:
            data[at:at] = data[at : at + length]
        elif how == 3:
            data[at : at + length] = rng.randbytes(length)
        elif how == 4:
            data[at:at] = rng.randbytes(length)
        else:
            del data[at:]
    return bytes(data)


def damaged_values(content: Any, rng: random.Random) -> Any:
    """One or more values of nested dicts and lists replaced, removed, renamed or doubled."""
    content = copy.deepcopy(content)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        holder, key = content, None
        while isinstance(holder, dict | list) and holder:
            parent, key = holder, rng.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
            holder = parent[key]
            if rng.random() < 0.25:
                break
        if key is None:
            return copy.deepcopy(rng.choice(ODD_VALUES))
        tensors = isinstance(parent[key], torch.Tensor) and rng.random() < 0.7
        how = rng.randrange(6)
        if how == 0:
            del parent[key]
        elif how == 1 and isinstance(parent, dict):
            parent[rng.choice((f"{key}x", "blocks.999.attention.query.weight", 5))] = parent.pop(key)
        elif how == 2 and isinstance(parent, list):
            parent.insert(rng.randrange(len(parent) + 1), parent[key])
        else:
            parent[key] = rng.choice(ODD_TENSORS)() if tensors else copy.deepcopy(rng.choice(ODD_VALUES))
    return content


class Targets:
    """Sound files of every kind, and what their users do with them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.runs, self.prepared = folder, [], []
        self.shared = folder / "run-shared"
        (folder / "text.txt").write_text(TEXT, encoding="utf-8")
        for tokenizer in ("char", "bpe"):
            data, out_dir = folder / f"data-{tokenizer}", folder / f"run-{tokenizer}"
            options = PrepareSettings(source="text.txt", tokenizer=tokenizer, vocab_size=300)
            with open_source(str(folder / "text.txt"), folder) as source:
                prepare(source, options, data)
            train.main([f"--data_dir={data}", f"--out_dir={out_dir}", "--max_iters=2", "--optimizer=muon", *TINY])
            self.runs.append(out_dir)
            self.prepared.append(data)
        self.shared.mkdir()
        (self.shared / "last.pt").write_bytes((self.runs[0] / "last.pt").read_bytes())
        in_shards(self.shared / "last.pt")

    def use_checkpoint(self, path: Path) -> None:
        """Sample one token, and take back the training state."""
        content = load_checkpoint(path, lazily=False)
        tokenizer = tokenizer_from_checkpoint(content, path)
        model = model_from_checkpoint(content, path)
        ids = tokenizer.encode("Line")
        with torch.inference_mode():
            model(torch.tensor([ids.astype("int64")]))
        if "optimizer" in content and isinstance(content.get("settings"), dict):
            given = read_given(TrainSettings, [], takes_preset=True)
            settings = settings_to_resume(content["settings"], given, path.parent)
            scaler = torch.amp.GradScaler("cpu", enabled=False)
            data = PreparedData(self.prepared[0])
            Run(path.parent, settings, data, model, make_optimizer(model, settings), scaler).restore(content)

    def use_prepared(self, folder: Path) -> None:
        """Open it, encode with its tokenizer, read a window."""
        data = PreparedData(folder)
        data.tokenizer.decode(data.tokenizer.encode("Line 5\n"))
        data.train.windows(torch.tensor([0, 1]).numpy(), 8)

    def use_settings(self, path: Path) -> None:
        """Read them as a preset."""
        checked(TrainSettings, read_given(TrainSettings, [str(path)], takes_preset=True).values)


def cases(targets: Targets, rng: random.Random) -> list[tuple[str, Callable[[], None]]]:
    """One attempt of every kind: damage a file, then use it."""
    out_dir, prepared = rng.choice(targets.runs), rng.choice(targets.prepared)
    damaged = targets.folder / "damaged"
    checkpoint = damaged / "last.pt"

    def raw_checkpoint() -> None:
        checkpoint.write_bytes(damaged_bytes((out_dir / "last.pt").read_bytes(), rng))
        targets.use_checkpoint(checkpoint)

    def checkpoint_values() -> None:
        content = torch.load(out_dir / "last.pt", weights_only=True)
        torch.save(damaged_values(content, rng), checkpoint)
        targets.use_checkpoint(checkpoint)

    def checkpoint_tokenizer() -> None:
        content = torch.load(out_dir / "last.pt", weights_only=True)
        content["tokenizer"] = json.dumps(damaged_values(json.loads(content["tokenizer"]), rng))
        torch.save(content, checkpoint)
        targets.use_checkpoint(checkpoint)

    def shards(name: str) -> None:
        shutil.copytree(targets.shared, damaged, dirs_exist_ok=True)
        if name == "values":
            torch.save(damaged_values(torch.load(checkpoint, weights_only=True), rng), checkpoint)
        else:
            path = damaged / name
            path.write_bytes(damaged_bytes(path.read_bytes(), rng))
        targets.use_checkpoint(checkpoint)

    def prepared_file(name: str, structured: bool) -> None:
        for file in prepared.iterdir():
            (damaged / file.name).write_bytes(file.read_bytes())
        content = (prepared / name).read_bytes()
        if structured:
            content = json.dumps(damaged_values(json.loads(content), rng)).encode("utf-8")
        else:
            content = damaged_bytes(content, rng)
        (damaged / name).write_bytes(content)
        targets.use_prepared(damaged)

    def settings() -> None:
        (damaged / "settings.toml").write_bytes(damaged_bytes((out_dir / "settings.toml").read_bytes(), rng))
        targets.use_settings(damaged / "settings.toml")

    return [
        ("checkpoint, bytes", raw_checkpoint),
        ("checkpoint, values", checkpoint_values),
        ("checkpoint, tokenizer", checkpoint_tokenizer),
        ("checkpoint in shards, values", lambda: shards("values")),
        ("shards, description", lambda: shards("last.shards-a/.metadata")),
        ("shards, numbers", lambda: shards("last.shards-a/__0_0.distcp")),
        ("meta.json, bytes", lambda: prepared_file("meta.json", False)),
        ("meta.json, values", lambda: prepared_file("meta.json", True)),
        ("tokenizer.json, bytes", lambda: prepared_file("tokenizer.json", False)),
        ("tokenizer.json, values", lambda: prepared_file("tokenizer.json", True)),
        ("token file, bytes", lambda: prepared_file("train.bin", False)),
        ("settings.toml, bytes", settings),
    ]


def main(folder: Path, count: int, seed: int) -> None:
    """Try so many files; anything but success and a clean error ends it with the kind and the number of the file."""
    torch.set_num_threads(1)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        targets = Targets(folder)
    (folder / "damaged").mkdir()
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))
    results: Counter[str] = Counter()
    for number in range(count):
        rng = random.Random(seed * 1_000_003 + number)
        kinds = cases(targets, rng)
        kind, attempt = kinds[number % len(kinds)]
        faulthandler.dump_traceback_later(SECONDS_FOR_ONE, exit=True)
        try:
            attempt()
            results["loads"] += 1
        except UserError as error:
            results["clean errors"] += 1
            if len(str(error).splitlines()) > 2 or len(str(error)) > 1000:
                raise AssertionError(f"{kind}, file {number}: a long error: {str(error)[:2000]}") from None
        except BaseException as error:
            raise AssertionError(
                f"{kind}, file {number}, seed {seed}: {type(error).__name__}: {error}"[:2000]
            ) from error
        finally:
            faulthandler.cancel_dump_traceback_later()
    peak = (resident_memory(peak=True) or 0) // 2**20
    print(json.dumps({**results, "peak_megabytes": peak}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
