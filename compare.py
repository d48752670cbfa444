"""Manual attention and SDPA side by side: are they the same, which is quicker here, and do they learn alike?

python compare.py
python compare.py --text=my_text.txt --preset=shakespeare_char
python compare.py --runs runs/manual runs/sdpa
"""

import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

import train
from comparison.agreement import PATHS, Agreement, Difference, agreements
from comparison.processes import Measured
from comparison.runs import differing_settings, learning_curves, read_run, results
from comparison.speed import FORWARD, STEP, Pair, Work, conclusions, measure
from comparison.tables import table_lines
from comparison.timing import machine
from config.command_line import parse, read_given
from config.errors import UserError, run_command
from config.schema import CompareSettings, TrainSettings
from data.files import written_whole
from engine.device import choose_device
from engine.run import how_to_begin, open_data
from views.plots import comparison_picture, runs_picture

ALL_DTYPES = ("float64", "float32", "bfloat16", "float16")
DISAGREE = 1  # exit status when the two paths are not the same


def main(argv: list[str]) -> None:
    """Compare what the command line asks for; write compare.json and compare.png."""
    settings = parse(CompareSettings, argv)
    out_dir = Path(settings.out_dir)
    if settings.runs:
        compare_runs([Path(folder) for folder in settings.runs], out_dir)
        return
    device = choose_device(settings.device)
    training = options_of_training(settings, out_dir)
    out_dir.mkdir(parents=True, exist_ok=True)
    agreed = compare_numbers(settings, device)
    pairs = compare_speed(settings, device)
    curves = compare_learning(training, out_dir) if training else None
    said = [sentence_of_agreement(agreed), *conclusions(pairs), *([sentence_of_learning(curves)] if curves else [])]
    comparison = {
        "machine": machine(),
        "settings": settings.model_dump(),
        "agreement": [{**asdict(case), "agrees": case.agrees} for case in agreed],
        "speed": [pair.as_plain() for pair in pairs],
        "curves": curves,
        "conclusions": said,
    }
    write(out_dir, comparison)
    if pairs or curves:
        write_picture(out_dir, comparison_picture(comparison))
    print(f"\nOn this machine ({machine()}): {'; '.join(said)}.")
    if not all(case.agrees for case in agreed):
        sys.exit(DISAGREE)


def options_of_training(settings: CompareSettings, out_dir: Path) -> list[str]:
    """What both trainings have in common, checked, and their text prepared; none where no curves are asked for.

    Without dropout, whose draws would differ.

    Raises:
        UserError: the text or a setting is wrong, or an earlier comparison's runs lie where the new ones would go.
    """
    if not (settings.text or settings.data_dir):
        return []
    for path in PATHS:
        if (out_dir / path / "last.pt").exists():
            raise UserError(
                f"{out_dir / path}: already holds a run; name another --out_dir, or look at both with "
                f"--runs {shlex.join(str(out_dir / name) for name in PATHS)}"
            )
    source = f"--text={settings.text}" if settings.text else f"--data_dir={settings.data_dir}"
    options = ["--dropout=0", "--log_interval=1", f"--seed={settings.seed}", f"--device={settings.device}",
               f"--max_iters={settings.max_iters}", f"--eval_interval={settings.max_iters}"]  # fmt: skip
    given = read_given(TrainSettings, [settings.preset, source, *options], takes_preset=True)
    beginning = how_to_begin(given, out_dir / PATHS[0], resume=False)
    data = open_data(beginning.settings, None, beginning.tokenizer)
    return [settings.preset, f"--data_dir={data.folder}", *options]


def compare_numbers(settings: CompareSettings, device: torch.device) -> list[Agreement]:
    """Outputs and gradients of both paths in every precision that the device has."""
    dtypes = [name for name in ALL_DTYPES if not (device.type == "mps" and name == "float64")]
    found = list(agreements(dtypes, settings.n_embd, settings.n_head, device, settings.seed))
    rows = [
        [case.dtype, case.case, case.of, *map(words, (case.manual, case.sdpa, case.between)),
         "yes" if case.agrees else "NO"]
        for case in found
    ]  # fmt: skip
    print("Largest differences, absolute and as a share of the largest value; the reference is manual in float64\n")
    columns = ["dtype", "with", "of", "manual from reference", "SDPA from reference", "SDPA from manual", "agree"]
    print("\n".join(table_lines(columns, rows)), end="\n\n", flush=True)
    return found


def words(difference: Difference) -> str:
    """A difference as it stands in the table."""
    return f"{difference.absolute:.1e} {difference.relative:.1e}"


def compare_speed(settings: CompareSettings, device: torch.device) -> list[Pair]:
    """Time and memory of both paths at every length and precision."""
    if not settings.rounds:
        return []
    work = Work(settings.n_embd, settings.n_head, settings.tokens, str(device))
    total = len(settings.lengths) * len(settings.dtypes)
    measured = measure(settings.lengths, settings.dtypes, work, settings.rounds)
    pairs = list(tqdm(measured, desc="timing", total=total, leave=False))
    rows = []
    for pair in pairs:
        for name, path in (("manual", pair.manual), ("SDPA", pair.sdpa)):
            ratio = relation(pair) if name == "SDPA" else ""
            rows.append([pair.dtype, f"{pair.length:,}", name, *figures(path), ratio, path.facts.get("kernel", "")])
    columns = ["dtype", "T", "path", f"{FORWARD}, ms", f"{STEP}, ms", "peak MB", "manual / SDPA", "kernel of SDPA"]
    work_done = (
        f"sequences of T that make {settings.tokens:,} tokens, one at least, of width {settings.n_embd} in "
        f"{settings.n_head} heads"
    )
    print(f"Medians of {settings.rounds} (shortest to longest): {work_done}\n")
    print("\n".join(table_lines(columns, rows)), flush=True)
    return pairs


def figures(path: Measured) -> list[str]:
    """Times and memory of one path, or why there are none."""
    if path.failed:
        return [path.failed, "", ""]
    memory = "-" if path.own_megabytes is None else f"{path.own_megabytes:,.0f}"
    return [str(path.timings[FORWARD]), str(path.timings[STEP]), memory]


def relation(pair: Pair) -> str:
    """How many times as long manual takes, where both could be timed."""
    if pair.manual.failed or pair.sdpa.failed:
        return ""
    return f"{pair.manual.timing.median / pair.sdpa.timing.median:.2f}"


def compare_learning(options: list[str], out_dir: Path) -> dict[str, Any]:
    """Train twice from one seed on the same batches, once with each path."""
    records = []
    for path in PATHS:
        print(f"\ntraining with {path} attention", flush=True)
        train.main([*options, f"--attention_impl={path}", f"--out_dir={out_dir / path}"])
        records.append(read_run(out_dir / path))
    return learning_curves(*records)


def sentence_of_agreement(agreed: Sequence[Agreement]) -> str:
    """Whether the paths are the same, and how nearly."""
    apart = sorted({f"{case.dtype}, {case.case}" for case in agreed if not case.agrees})
    if apart:
        return f"manual and SDPA are NOT the same within rounding in {'; '.join(apart)}"
    worst = {case.dtype: 0.0 for case in agreed}
    for case in agreed:
        worst[case.dtype] = max(worst[case.dtype], case.between.relative)
    told = ", ".join(f"{relative:.0e} in {dtype}" for dtype, relative in worst.items())
    return f"manual and SDPA are the same within rounding (outputs and gradients differ by at most {told})"


def sentence_of_learning(curves: dict[str, Any]) -> str:
    """How far the two learning curves came apart."""
    largest = max(curves["difference"], key=abs)
    step = curves["steps"][curves["difference"].index(largest)]
    return (
        f"after {curves['steps'][-1]:,} updates the training losses are {curves['manual'][-1]:.4f} with manual and "
        f"{curves['sdpa'][-1]:.4f} with SDPA, {abs(largest):.1e} apart at most (update {step:,})"
    )


def compare_runs(folders: list[Path], out_dir: Path) -> None:
    """What differs in the settings of runs, and what came of each; their curves in one picture."""
    runs = [read_run(folder) for folder in folders]
    names = [run.name for run in runs]
    differing, reached = differing_settings(runs), results(runs)
    print("\n".join(table_lines(["setting", *names], differing or [["all", *("the same" for _ in names)]])))
    print()
    print("\n".join(table_lines(["result", *names], reached)))
    out_dir.mkdir(parents=True, exist_ok=True)
    comparison = {"runs": names, "settings": differing, "results": reached}
    write(out_dir, comparison)
    write_picture(out_dir, runs_picture({run.name: run.lines for run in runs}))


def write(out_dir: Path, comparison: dict[str, Any]) -> None:
    """Write compare.json."""
    with written_whole(out_dir / "compare.json") as file:
        file.write((json.dumps(comparison, indent=1) + "\n").encode("utf-8"))
    print(f"\nwritten: {out_dir / 'compare.json'}")


def write_picture(out_dir: Path, picture: bytes) -> None:
    """Write compare.png."""
    with written_whole(out_dir / "compare.png") as file:
        file.write(picture)
    print(f"written: {out_dir / 'compare.png'}")


if __name__ == "__main__":
    run_command(main)
