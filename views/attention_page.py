"""A page to see attention in: which tokens each token of a text attends to, in every head of every layer.

The weights go into the page as 16-bit fractions, compressed: a weight is off by less than 0.00001.
"""

import base64
import gzip
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from data.tokenizers import Tokenizer
from model import GPT
from views.pages import write_page
from views.token_text import token_texts

LONGEST_TEXT = 512  # tokens that a browser draws at ease
FULL = 65535  # stands for a weight of 1


def write_attention_page(path: Path, model: GPT, tokenizer: Tokenizer, ids: Sequence[int], title: str) -> int:
    """Write the page for the last tokens of a text, as many as the model and the page hold.

    Args:
        path: of the page.
        model: in eval mode.
        tokenizer: of the model.
        ids: of the text, at least one.
        title: what the page says it shows.

    Returns:
        How many tokens it shows.

    Raises:
        OSError: the page cannot be written.
    """
    shown = list(ids[-min(model.config.block_size, LONGEST_TEXT) :])
    layers, surprises = attention_and_surprise(model, shown)
    texts = token_texts(shown, tokenizer)
    data = {
        "tokens": [token._asdict() for token in texts],
        "surprises": surprises,
        "heads": model.config.n_head,
        "layers": [packed_weights(weights) for weights in layers],
    }
    write_page(path, "attention_page.html", title=title, left_out=len(ids) - len(shown), data=data)
    return len(shown)


def attention_and_surprise(model: GPT, ids: Sequence[int]) -> tuple[list[Tensor], list[float | None]]:
    """What the model does with a text in one pass.

    Args:
        model: in eval mode.
        ids: of T tokens, at most block_size.

    Returns:
        The weights of each layer, (H, T, T) float32 on the CPU; and each token's surprise, -log2 of the probability
        that the model gave it, in bits, None for the first.
    """
    tokens = torch.tensor([list(ids)], device=model.device)
    with torch.inference_mode():
        logits, _, weights = model(tokens, return_attention_weights=True)
        log_probabilities = logits[0, :-1].float().log_softmax(dim=-1)  # (T - 1, V)
        nats = -log_probabilities.gather(1, tokens[0, 1:, None])[:, 0]
    return [layer[0].float().cpu() for layer in weights], [None, *(nats / math.log(2)).tolist()]


def packed_weights(weights: Tensor) -> str:
    """Weights (H, T, T) -> their lower triangles, row by row, as little-endian 16-bit fractions, gzip and Base64."""
    rows, columns = np.tril_indices(weights.shape[-1])
    fractions = np.rint(weights.numpy()[:, rows, columns] * FULL).astype("<u2")
    return base64.b64encode(gzip.compress(fractions.tobytes(), compresslevel=4, mtime=0)).decode("ascii")
