"""Manual attention against PyTorch's fused one: a forward and backward pass of one attention module.

python -m bench.attention
"""

from bench.cases import ATTENTION_DTYPES, ATTENTION_LENGTHS, ATTENTION_TOKENS
from bench.processes import time_cases_in_turn
from bench.timing import write_table


def main() -> None:
    """Time both paths at every length and precision, each in a process of its own, and write the table."""
    nothing = time_cases_in_turn(["nothing"], rounds=1)["nothing"].peak_megabytes
    rows = []
    for dtype in ATTENTION_DTYPES:
        for length in ATTENTION_LENGTHS:
            names = [f"attention {path} {dtype} {length}" for path in ("manual", "sdpa")]
            manual, sdpa = time_cases_in_turn(names, rounds=7).values()
            ratio = manual.timing.median / sdpa.timing.median
            memory = [f"{measured.peak_megabytes - nothing:,.0f}" for measured in (manual, sdpa)]
            rows.append([dtype, str(length), str(manual.timing), str(sdpa.timing), f"{ratio:.2f}", *memory])
            print(" ".join(rows[-1]), flush=True)
    title = f"Manual and fused attention, forward and backward, {ATTENTION_TOKENS} tokens of width 256 in 4 heads"
    times = ["manual, ms (min to max)", "sdpa, ms (min to max)", "manual / sdpa"]
    columns = ["dtype", "T", *times, "manual, peak MB", "sdpa, peak MB"]
    print(write_table("attention", title, "python -m bench.attention", columns, rows))


if __name__ == "__main__":
    main()
