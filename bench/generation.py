"""Generation with and without the KV cache, on an untrained model of the demo's shape.

python -m bench.generation
"""

from collections.abc import Callable

import torch

from bench.tables import write_table
from comparison.timing import time_in_turn
from config.command_line import parse
from config.schema import TrainSettings
from engine.generation import generate
from model import GPT

NEW_TOKENS = (8, 32, 128, 255)


def generation(model: GPT, count: int, kv_cache: bool) -> Callable[[], None]:
    """A function that generates so many tokens after a prompt of one."""
    prompt = torch.zeros(1, 1, dtype=torch.int64, device=model.device)

    def run() -> None:
        for _ in generate(model, prompt, count, kv_cache=kv_cache):
            pass

    return run


def main() -> None:
    """Time both at several lengths and write the table."""
    settings = parse(TrainSettings, ["quick"], takes_preset=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = GPT(settings.gpt_config(settings.vocab_size)).to(device).eval()
    rows = []
    for count in NEW_TOKENS:
        runs = {name: generation(model, count, cached) for name, cached in (("cached", True), ("recomputed", False))}
        timings = time_in_turn(runs)
        ratio = timings["recomputed"].median / timings["cached"].median
        speed = count / timings["cached"].median
        rows.append([str(count), str(timings["cached"]), str(timings["recomputed"]), f"{ratio:.2f}", f"{speed:.0f}"])
        print(" ".join(rows[-1]), flush=True)
    columns = [
        "new tokens",
        "cached, ms (min to max)",
        "recomputed, ms (min to max)",
        "recomputed / cached",
        "cached tokens/s",
    ]
    title = f"Generation with and without the KV cache, {model.parameter_count():,} parameters, float32"
    print(write_table("generation", title, "python -m bench.generation", columns, rows))


if __name__ == "__main__":
    main()
