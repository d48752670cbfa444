"""Text -> tokens on disk.

python prepare.py my_text.txt --tokenizer=char
python prepare.py stdlib --tokenizer=bpe --vocab_size=2048 --out_dir=data/prepared/stdlib
"""

import shlex
from pathlib import Path

from config.command_line import parse
from config.errors import run_command
from config.preparation import PrepareSettings
from data.dataset import Metadata
from data.preparation import DOWNLOADS, default_folder, prepare
from data.sources import open_source


def main(argv: list[str]) -> None:
    """Prepare one text and say what came of it."""
    settings = parse(PrepareSettings, argv)
    with open_source(settings.source, DOWNLOADS) as source:
        out_dir = Path(settings.out_dir) if settings.out_dir else default_folder(source, settings)
        print(summary(prepare(source, settings, out_dir), learned=settings.tokenizer == "bpe"))
    print(f"written to {out_dir}; train on it with: python train.py --data_dir={shlex.quote(str(out_dir))}")


def summary(metadata: Metadata, learned: bool) -> str:
    """What a prepared folder holds, in a few lines; whether its vocabulary was learned from the text."""
    tokens = metadata.train_tokens + metadata.val_tokens
    lines = [
        f"source      {metadata.source}: {metadata.documents:,} documents, each followed by one end-of-text id",
        f"text        {metadata.characters:,} characters, {metadata.bytes:,} bytes",
        f"tokenizer   {metadata.tokenizer}, {metadata.vocab_size:,} ids stored as {metadata.dtype}",
        f"tokens      {tokens:,}: {metadata.train_tokens:,} for training, {metadata.val_tokens:,} for validation; "
        f"{metadata.characters / tokens:.2f} characters per token, "
        f"{tokens / max(1, metadata.characters):.2f} tokens per character",
    ]
    asked = metadata.requested_vocab_size
    if learned and metadata.vocab_size < asked:
        lines.append(f"note        the text has pairs for {metadata.vocab_size:,} of the {asked:,} ids asked for")
    return "\n".join(lines)


if __name__ == "__main__":
    run_command(main)
