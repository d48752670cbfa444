"""Manual attention against PyTorch's fused one: a forward and backward pass of one attention module.

python -m bench.attention
"""

from collections.abc import Callable

import torch

from bench.timing import time_in_turn, write_table
from engine.device import autocast
from model import GPTConfig, MultiHeadAttention

TOKENS = 4096  # in a batch, whatever its length
N_EMBD, N_HEAD = 256, 4
LENGTHS = (64, 128, 256, 512, 1024, 2048)
DTYPES = (torch.float32, torch.bfloat16)


def training_step(path: str, length: int, dtype: torch.dtype, device: torch.device) -> Callable[[], None]:
    """A function that runs one forward and backward pass."""
    config = GPTConfig(block_size=length, n_embd=N_EMBD, n_head=N_HEAD, attention_impl=path)  # type: ignore[arg-type]
    attention = MultiHeadAttention(config).to(device)
    x = torch.randn(TOKENS // length, length, N_EMBD, device=device)

    def step() -> None:
        with autocast(device, dtype):
            output, _ = attention(x)
        output.float().square().mean().backward()
        attention.zero_grad(set_to_none=True)

    return step


def main() -> None:
    """Time both paths at every length and precision and write the table."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows = []
    for dtype in DTYPES:
        for length in LENGTHS:
            timings = time_in_turn({path: training_step(path, length, dtype, device) for path in ("manual", "sdpa")})
            ratio = timings["manual"].median / timings["sdpa"].median
            name = str(dtype).removeprefix("torch.")
            rows.append([name, str(length), str(timings["manual"]), str(timings["sdpa"]), f"{ratio:.2f}"])
            print(" ".join(rows[-1]), flush=True)
    title = f"Manual and fused attention, forward and backward, {TOKENS} tokens of width {N_EMBD} in {N_HEAD} heads"
    columns = ["dtype", "T", "manual, ms (min to max)", "sdpa, ms (min to max)", "manual / sdpa"]
    print(write_table("attention", title, "python -m bench.attention", columns, rows))


if __name__ == "__main__":
    main()
