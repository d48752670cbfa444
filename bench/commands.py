"""Whole commands: training to a known loss, the first character of a sample, preparing much text.

python -m bench.commands                  Tiny Shakespeare from where it was downloaded
python -m bench.commands --text=input.txt
"""

import argparse
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import tiktoken
import torch
import torch.nn.functional as F
from tiktoken_ext.openai_public import r50k_pat_str

from bench.cases import SMALL, transformers_gpt2
from bench.tables import write_table
from comparison.processes import ROOT
from comparison.timing import Timing
from data.preparation import DOWNLOADS, PREPARED
from data.sources import open_source, read_documents
from data.tokenizers import BPETokenizer, tokenizer_from_json

ROUNDS = 5
LARGE_TEXT_BYTES = 200_000_000


def command(*words: str) -> tuple[float, str, float]:
    """Run one with this Python: seconds, standard output, and peak memory in megabytes."""
    started = time.perf_counter()
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen([sys.executable, *words], cwd=ROOT, stdout=output, stderr=subprocess.DEVNULL)
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - started
        output.seek(0)
        if status:
            raise RuntimeError(f"{' '.join(words)}: failed")
        return seconds, output.read(), usage.ru_maxrss / 1024


def first_character(run_dir: Path) -> float:
    """Seconds from the start of sample.py to the first character after the prompt."""
    started = time.perf_counter()
    words = [sys.executable, "sample.py", f"--out_dir={run_dir}", "--prompt=A"]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        process.stdout.read(2)
        seconds = time.perf_counter() - started
        process.kill()
    return seconds


def nanogpt_recipe(text: Path) -> float:
    """The peer: transformers' GPT-2 trained as nanoGPT's CPU recipe says, in float32; the full validation loss.

    2,000 updates of 12 x 64 characters, AdamW from 1e-3 to 1e-4, 20 batches of both parts every 250 updates.
    """
    characters = np.frombuffer(text.read_bytes(), dtype=np.uint8)
    ids = np.unique(characters, return_inverse=True)[1]
    parts = {"train": ids[: int(0.9 * len(ids))], "val": ids[int(0.9 * len(ids)) :]}
    model = transformers_gpt2(SMALL)
    matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.99))
    random = np.random.default_rng(1337)

    def loss_of(name: str) -> torch.Tensor:
        starts = random.integers(0, len(parts[name]) - 65, size=12)
        windows = torch.from_numpy(np.stack([parts[name][start : start + 65] for start in starts]))
        return F.cross_entropy(model(windows[:, :-1]).logits.flatten(0, 1), windows[:, 1:].flatten())

    for step in range(2000):
        if step % 250 == 0:
            with torch.no_grad():
                for name in parts:
                    torch.stack([loss_of(name) for _ in range(20)]).mean().item()
        decay = 0.5 * (1 + math.cos(math.pi * (step - 100) / 1900))
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * (step + 1) / 101 if step < 100 else 1e-4 + decay * 9e-4
        loss = loss_of("train")
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()
    windows = torch.from_numpy(parts["val"][: (len(parts["val"]) - 1) // 64 * 64 + 1])
    inputs, targets = windows[:-1].view(-1, 64), windows[1:].view(-1, 64)
    with torch.no_grad():
        logits = torch.cat([model(batch).logits for batch in torch.split(inputs, 128)])
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten()).item()


def in_turn(ours: Callable[[], float], peer: Callable[[], float]) -> tuple[Timing, Timing]:
    """Seconds of both, A B A B ..."""
    pairs = [(ours(), peer()) for _ in range(ROUNDS)]
    return Timing(tuple(a for a, _ in pairs)), Timing(tuple(b for _, b in pairs))


def training_row(text: Path, folder: Path) -> list[str]:
    """Seconds to the loss that nanoGPT's CPU recipe ends with."""
    losses: dict[str, set[str]] = {"ours": set(), "peer": set()}

    def ours() -> float:
        shutil.rmtree(folder / "run", ignore_errors=True)
        for prepared in PREPARED.glob(f"{text.stem}-char-*"):
            shutil.rmtree(prepared)
        words = ["train.py", "shakespeare_ten_seconds", f"--text={text}", f"--out_dir={folder / 'run'}"]
        seconds, output, _ = command(*words)
        losses["ours"].add(output.split("validation loss ")[1][:6])
        return seconds

    def peer() -> float:
        seconds, output, _ = command("-m", "bench.commands", f"--text={text}", "--recipe")
        losses["peer"].add(output.strip()[:6])
        return seconds

    a, b = in_turn(ours, peer)
    what = f"train.py shakespeare_ten_seconds, prepared anew, to a validation loss of {', '.join(losses['ours'])}"
    name = f"transformers by nanoGPT's CPU recipe, fp32, to {', '.join(losses['peer'])}: {b}"
    return [what, str(a), name, f"{b.median / a.median:.2f}"]


def startup_row(folder: Path) -> list[str]:
    """Seconds to the first character, beside those of importing torch."""
    a, b = in_turn(lambda: first_character(folder / "run"), lambda: command("-c", "import torch")[0])
    return ["sample.py to the first character", str(a), f"python -c 'import torch': {b}", f"{b.median / a.median:.2f}"]


def preparation_rows(folder: Path) -> Iterator[list[str]]:
    """Seconds for 200 MB of the standard library's source, repeated, beside tiktoken on one thread.

    tiktoken has its own form of GPT-2's pattern. Ours: with a BPE that is there, and with one that is learned first.
    """
    large, prepared = folder / "large.txt", folder / "prepared"
    with open_source("stdlib", DOWNLOADS) as source, large.open("w", encoding="utf-8") as file:
        pieces = [
            piece for document in source.documents for text in read_documents(document, "utf-8") for piece in text
        ]
        while file.tell() < LARGE_TEXT_BYTES:
            file.writelines(pieces)

    memory = []

    def ours(option: str) -> float:
        shutil.rmtree(prepared, ignore_errors=True)
        seconds, _, peak = command("prepare.py", str(large), f"--out_dir={prepared}", option)
        memory.append(peak)
        return seconds

    ours("--vocab_size=4096")
    learned = Path(shutil.copy(prepared / "tokenizer.json", folder))
    tokenizer = tokenizer_from_json(learned.read_text(encoding="utf-8"))
    assert isinstance(tokenizer, BPETokenizer)
    ranks = {token: rank for rank, token in enumerate(tokenizer.ranks) if token}
    encoding = tiktoken.Encoding("peer", pat_str=r50k_pat_str, mergeable_ranks=ranks, special_tokens={})

    def peer() -> float:
        started = time.perf_counter()
        for _ in range(math.ceil(LARGE_TEXT_BYTES / sum(map(len, pieces)))):
            for piece in pieces:
                encoding.encode_ordinary(piece)
        return time.perf_counter() - started

    for tokenizer_is, option in (
        ("a BPE of 4,096 that is there", f"--tokenizer={learned}"),
        ("a BPE of 4,096 learned first", "--vocab_size=4096"),
    ):
        memory.clear()
        a, b = in_turn(partial(ours, option), peer)
        what = f"prepare.py, 200 MB, {tokenizer_is}; peak memory {max(memory):,.0f} MB"
        name = f"tiktoken encoding the same on one thread, with GPT-2's pattern: {b}"
        yield [what, str(a), name, f"{b.median / a.median:.2f}"]


def all_rows(text: Path, folder: Path) -> Iterator[list[str]]:
    """The table, a row as soon as it is measured."""
    yield training_row(text, folder)
    yield startup_row(folder)
    yield from preparation_rows(folder)


def main(argv: list[str]) -> None:
    """Time every command beside its peer and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--text", type=Path, default=DOWNLOADS / "tinyshakespeare.txt", help="Tiny Shakespeare")
    parser.add_argument("--recipe", action="store_true", help="only train the peer and print its loss")
    asked = parser.parse_args(argv)
    if asked.recipe:
        print(nanogpt_recipe(asked.text))
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = []
        for row in all_rows(asked.text.resolve(), folder):
            print(" | ".join(row), flush=True)
            rows.append(row)
    columns = ["what", "glassgpt, ms (min to max)", "peer, ms (min to max)", "times as quick"]
    print(write_table("commands", "Whole commands", "python -m bench.commands", columns, rows))


if __name__ == "__main__":
    main(sys.argv[1:])
