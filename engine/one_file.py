"""Checkpoints in shards -> one file each, in their run directory.

python -m engine.one_file runs/big

Nothing needs it: whatever reads a checkpoint reads shards, too. It is for moving a checkpoint elsewhere.
"""

from pathlib import Path

from config.command_line import parse
from config.errors import UserError, run_command
from config.schema import OneFileSettings
from engine.checkpoint import load_checkpoint, save_checkpoint
from engine.run import sole_use


def main(argv: list[str]) -> None:
    """Put the numbers of each checkpoint of a run into its file."""
    run = Path(parse(OneFileSettings, argv).run)
    paths = [path for path in (run / "last.pt", run / "best.pt") if path.is_file()]
    if not paths:
        raise UserError(f"{run}: holds no last.pt or best.pt; expected a run directory")
    with sole_use(run):
        for path in paths:
            if "shards" in load_checkpoint(path, numbers=False):
                save_checkpoint(path, load_checkpoint(path, lazily=False))
                print(f"{path}: now one file")
            else:
                print(f"{path}: is one file")


if __name__ == "__main__":
    run_command(main)
