"""This repository against its peers, everything in turn on the same machine, into one table.

python -m bench.peers              every row; about a quarter of an hour on two cores
python -m bench.peers gpt2 text    the rows whose names contain these words
"""

import sys
from dataclasses import dataclass

from bench.cases import GPT2, our_config, time_cases_in_turn
from bench.tables import write_table
from comparison.processes import Measured

MATRIX_PRODUCT_OPERATIONS = 2 * 4096**3


@dataclass(frozen=True)
class Row:
    """One comparison.

    Attributes:
        what: was timed.
        ours, peer: names in `bench.cases`.
        peer_name: what the peer is.
        units: tokens or the like of one run, for a rate of ours beside the ratio; 0 where a rate says nothing.
    """

    what: str
    ours: str
    peer: str
    peer_name: str
    units: int = 0


SMALL_STEP = "training step, 4 layers, width 128, batch 12 x 64, bf16"
GPT2_STEP = "training step, GPT-2 small, batch 4 x 256, bf16"
SMALL_TEXT = "256 tokens, 4 layers, width 128, context 64, fp32"
GPT2_TEXT = "256 tokens, GPT-2 small"
SIXTEEN = "gpt2 text bf16 ours 16 at once"
DEFAULTS = "small step ours defaults"

ROWS = (
    Row(SMALL_STEP, "small step ours", "small step transformers", "transformers", 768),
    Row(SMALL_STEP, "small step ours", "small step transformers eager", "transformers, eager attention", 768),
    Row(SMALL_STEP, "small step ours", "small step x-transformers", "x-transformers", 768),
    Row(f"{SMALL_STEP}, exact GELU", DEFAULTS, "small step transformers", "transformers", 768),
    Row(f"{SMALL_STEP}, --compile", "small step ours compiled", "small step transformers", "transformers", 768),
    Row(f"{SMALL_STEP}, sdpa", "small step ours sdpa", "small step transformers", "transformers", 768),
    Row(GPT2_STEP, "gpt2 step ours", "gpt2 step transformers", "transformers", 1024),
    Row(GPT2_STEP, "gpt2 step ours", "gpt2 step transformers kept", "transformers, keeping freed memory too", 1024),
    Row(GPT2_STEP, "gpt2 step ours", "gpt2 step x-transformers", "x-transformers", 1024),
    Row(f"{GPT2_STEP}, --compile", "gpt2 step ours compiled", "gpt2 step transformers", "transformers", 1024),
    Row(
        SMALL_TEXT, "small text ours", "small text transformers windows", "transformers, whole windows as nanoGPT", 256
    ),
    Row(SMALL_TEXT, "small text ours", "small text ours windows", "our model, whole windows as nanoGPT", 256),
    Row(f"{GPT2_TEXT}, fp32", "gpt2 text fp32 ours", "gpt2 text fp32 transformers", "transformers, cached", 256),
    Row(f"{GPT2_TEXT}, bf16", "gpt2 text bf16 ours", "gpt2 text bf16 transformers", "transformers, cached", 256),
    Row(f"16 x {GPT2_TEXT}, bf16", SIXTEEN, "gpt2 text bf16 transformers 16 at once", "transformers, cached", 16 * 256),
    Row(f"16 x {GPT2_TEXT}, bf16", SIXTEEN, "gpt2 text bf16 ours", "ours, one of them", 16 * 256),
)


def line(row: Row, measured: dict[str, Measured]) -> list[str]:
    """A row of the table."""
    a, b = measured[row.ours], measured[row.peer]
    return [
        row.what,
        str(a.timing),
        f"{row.peer_name}: {b.timing}",
        f"{b.timing.median / a.timing.median:.2f}",
        f"{row.units / a.timing.median:,.0f}",
        " / ".join("-" if m.peak_megabytes is None else f"{m.peak_megabytes:,.0f}" for m in (a, b)),
    ]


def share_of_matrix_product(what: str, step: Measured, product: Measured) -> list[str]:
    """How near a GPT-2 step comes to doing nothing but matrix products."""
    operations = our_config(GPT2, "manual").operations_per_token * GPT2.batch_size * GPT2.block_size
    rate, best = operations / step.timing.median, MATRIX_PRODUCT_OPERATIONS / product.timing.median
    return [
        f"{what}: share of the rate of a bf16 matrix product of 4096 x 4096",
        f"{rate / 1e9:,.0f} GFLOP/s, 6 per parameter and token, and attention's",
        f"matrix product: {best / 1e9:,.0f} GFLOP/s",
        f"{rate / best:.2f}",
        "",
        "",
    ]


def main(words: list[str]) -> None:
    """Time the rows asked for and write the table, each block in turn."""
    rows = [row for row in ROWS if all(word in f"{row.ours} {row.peer}" for word in words)]
    table = []
    for what in dict.fromkeys(row.ours.rsplit(" ours")[0] for row in rows):
        block = [row for row in rows if row.ours.rsplit(" ours")[0] == what]
        names = [name for row in block for name in (row.ours, row.peer)]
        names += ["matrix product"] if what == "gpt2 step" else []
        measured = time_cases_in_turn(dict.fromkeys(names))
        lines = [line(row, measured) for row in block]
        if "matrix product" in measured:
            steps = {row.what: measured[row.ours] for row in block}
            lines += [share_of_matrix_product(what, step, measured["matrix product"]) for what, step in steps.items()]
        print("\n".join(" | ".join(cells) for cells in lines), flush=True)
        table += lines
    columns = ["what", "glassgpt, ms (min to max)", "peer, ms (min to max)", "times as quick", "tokens/s", "peak MB"]
    name = "-".join(["peers", *words])
    command = " ".join(["python -m bench.peers", *words])
    print(write_table(name, "glassgpt and its peers", command, columns, table))


if __name__ == "__main__":
    main(sys.argv[1:])
