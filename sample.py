"""A run directory -> completions.

python sample.py --out_dir=runs/quick --prompt="def " --num_samples=3
python sample.py --out_dir=runs/quick --temperature=0 --stop="def"
python sample.py --out_dir=runs/quick --prompt="def " --attention_page=attention.html
"""

import sys
from pathlib import Path

import torch

from config.command_line import parse
from config.errors import UserError, run_command
from config.schema import SampleSettings
from data.sources import same_newlines
from data.tokenizers import Tokenizer
from engine.checkpoint import load_checkpoint, model_from_checkpoint, tokenizer_from_checkpoint
from engine.decoding import NextLogits
from engine.device import choose_device, choose_dtype
from engine.generation import generate
from engine.text_stream import start_of_document, stream_text
from views.attention_page import write_attention_page


def main(argv: list[str]) -> None:
    """Print completions of one prompt as they are made."""
    settings = parse(SampleSettings, argv)
    refuse_page_without_place(settings.attention_page)
    path = checkpoint_path(settings)
    checkpoint = load_checkpoint(path)
    tokenizer = tokenizer_from_checkpoint(checkpoint, path)
    device = choose_device(settings.device)
    dtype, reason = choose_dtype(settings.dtype, device, training=False)
    changes = {"attention_impl": settings.attention_impl} if settings.attention_impl else {}
    model = model_from_checkpoint(checkpoint, path, **changes).to(device, dtype).eval()
    text = prompt_text(settings)
    prompt = prompt_ids(text, tokenizer, settings, documents=checkpoint["data"]["documents"])
    size = f"{model.parameter_count():,} parameters"
    note(f"{path}: step {checkpoint['step']:,}, {size}, on {device} in {dtype} ({reason})")
    step = checkpoint["step"]
    del checkpoint  # on Windows a file that is mapped cannot be replaced
    if len(prompt) > model.config.block_size:
        note(f"the prompt has {len(prompt):,} tokens; the model sees the last {model.config.block_size:,} of them")
    if settings.context_shift > model.config.block_size:
        raise UserError(
            f"context_shift = {settings.context_shift}: expected at most the model's context of "
            f"{model.config.block_size} tokens"
        )
    positions = len(prompt) + settings.max_new_tokens
    next_logits = NextLogits(model, 1, kv_cache=settings.kv_cache, positions=positions)
    for sample in range(settings.num_samples):
        if settings.num_samples > 1:
            print(f"--- sample {sample + 1} of {settings.num_samples}")
        ids = print_sample(next_logits, tokenizer, text, prompt, settings, sample)
    if settings.attention_page:
        title = f"{path}, step {step:,}"
        shown = write_attention_page(Path(settings.attention_page), model, tokenizer, [*prompt, *ids], title)
        note(f"{settings.attention_page}: shows the attention of {shown:,} tokens; open it in a browser")


def print_sample(
    next_logits: NextLogits, tokenizer: Tokenizer, text: str, prompt: list[int], settings: SampleSettings, sample: int
) -> list[int]:
    """Print the prompt and its completion, each piece as soon as it is known; the ids of the completion."""
    tokens = generate(
        next_logits.model,
        torch.tensor([prompt], device=next_logits.model.device),
        settings.max_new_tokens,
        temperature=settings.temperature,
        top_k=settings.top_k,
        top_p=settings.top_p,
        seed=settings.seed,
        first_sample=sample,
        context_shift=settings.context_shift,
        next_logits=next_logits,
    )
    print(text, end="", flush=True)
    made: list[int] = []
    try:
        ids = (made.append(token) or token for token in map(int, tokens))  # type: ignore[func-returns-value]
        for piece in stream_text(ids, tokenizer, stop=settings.stop, show_special=settings.show_special):
            print(piece, end="", flush=True)
    except FloatingPointError as error:
        print(flush=True)
        raise UserError(f"{error}: the checkpoint's weights are broken; sample from an earlier one") from None
    print(flush=True)
    return made


def refuse_page_without_place(page: str) -> None:
    """Find out before anything is generated.

    Raises:
        UserError: the page cannot be written where it should go.
    """
    if page and (Path(page).is_dir() or not Path(page).parent.is_dir()):
        raise UserError(f"attention_page = {page}: expected the name of an HTML file in a folder that exists")


def checkpoint_path(settings: SampleSettings) -> Path:
    """The file to sample from: the one named, or the best (else the last) of the run named, or of the newest run.

    Raises:
        UserError: there is no checkpoint there.
    """
    if settings.checkpoint:
        return Path(settings.checkpoint)
    if settings.out_dir:
        folder = Path(settings.out_dir)
        if not folder.is_dir():
            raise UserError(f"{folder}: no such run directory; train one with train.py, or name another --out_dir")
    else:
        saved = sorted(Path("runs").glob("*/last.pt"), key=lambda file: file.stat().st_mtime)
        if not saved:
            raise UserError("runs: there is no trained run here; train one with train.py, or name it with --out_dir")
        folder = saved[-1].parent
    best = folder / "best.pt"
    return best if best.exists() else folder / "last.pt"


def prompt_text(settings: SampleSettings) -> str:
    """The text to continue, under the newline rule of the training text.

    Raises:
        UserError: the prompt file cannot be read.
    """
    if not settings.prompt_file:
        return same_newlines(settings.prompt)
    try:
        return same_newlines(Path(settings.prompt_file).read_bytes().decode("utf-8-sig"))
    except OSError as error:
        raise UserError(f"{settings.prompt_file}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{settings.prompt_file}: not UTF-8 text (byte {error.start}: {error.reason})") from None


def prompt_ids(text: str, tokenizer: Tokenizer, settings: SampleSettings, documents: int) -> list[int]:
    """Token ids of the prompt; an empty one starts as a document starts.

    Raises:
        UserError: the tokenizer lacks a character of the prompt.
    """
    if text:
        return tokenizer.encode(text, parse_special=settings.parse_special).tolist()
    return [start_of_document(tokenizer, documents)]


def note(line: str) -> None:
    """Tell the reader something without touching the text on standard output."""
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    run_command(main)
