"""A run directory -> completions.

python sample.py --out_dir=runs/quick --prompt="def " --num_samples=3
python sample.py --out_dir=runs/quick --temperature=0 --stop="def"
python sample.py --out_dir=runs/quick --prompt="def " --attention_page=attention.html
python sample.py --out_dir=runs/quick --prompts_file=prompts.txt --batch_size=16
python sample.py --out_dir=runs/quick --interactive
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from config.command_line import parse
from config.errors import UserError, reason_of, run_command
from config.schema import SampleSettings
from data.sources import same_newlines
from data.tokenizers import Tokenizer
from engine.checkpoint import load_checkpoint, model_from_checkpoint, newest_checkpoint, tokenizer_from_checkpoint
from engine.completion import Completions
from engine.decoding import NextLogits
from engine.device import choose_device, choose_dtype
from engine.text_stream import start_of_document
from model import GPT


def main(argv: list[str]) -> None:
    """Print completions of the prompts as they are made."""
    settings = parse(SampleSettings, argv)
    refuse_page_without_place(settings.attention_page)
    path = checkpoint_path(settings)
    checkpoint = load_checkpoint(path)
    tokenizer = tokenizer_from_checkpoint(checkpoint, path)
    device = choose_device(settings.device)
    dtype, reason = choose_dtype(settings.dtype, device, training=False)
    changes = {"attention_impl": settings.attention_impl} if settings.attention_impl else {}
    model = model_from_checkpoint(checkpoint, path, **changes).to(device, dtype).eval()
    if settings.context_shift > model.config.block_size:
        raise UserError(
            f"context_shift = {settings.context_shift}: expected at most the model's context of "
            f"{model.config.block_size} tokens"
        )
    prompter = Prompter(tokenizer, settings, documents=checkpoint["data"]["documents"])
    prompts = None if settings.interactive else [prompter.read(text) for text in prompt_texts(settings)]
    title = f"{path}: step {checkpoint['step']:,}"
    note(f"{title}, {model.parameter_count():,} parameters, on {device} in {dtype} ({reason})")
    del checkpoint  # on Windows a file that is mapped cannot be replaced
    if prompts is None:
        for text in asked_texts():
            try:
                prompt = prompter.read(text.decode("utf-8"))
                note_if_too_long([prompt], model)
                print_completions(model, tokenizer, [prompt], settings)
            except (UserError, UnicodeDecodeError) as error:  # the next text may do
                note(str(error))
        return
    note_if_too_long(prompts, model)
    made = print_completions(model, tokenizer, prompts, settings)
    if settings.attention_page:
        from views.attention_page import write_attention_page  # the text appears sooner without what pages need

        ids = [*prompts[0].ids, *made]
        shown = write_attention_page(Path(settings.attention_page), model, tokenizer, ids, title)
        note(f"{settings.attention_page}: shows the attention of {shown:,} tokens; open it in a browser")


def note_if_too_long(prompts: list["Prompt"], model: GPT) -> None:
    """Say when the model will not see the whole of a prompt."""
    longest, block_size = max(len(prompt.ids) for prompt in prompts), model.config.block_size
    if longest > block_size:
        note(f"the prompt has {longest:,} tokens; the model sees the last {block_size:,} of them")


class Prompt(NamedTuple):
    """A text to continue, and its token ids."""

    text: str
    ids: list[int]


class Prompter:
    """Turns texts into prompts; an empty one starts as a document starts.

    Args:
        tokenizer: of the model.
        settings: of the sampling.
        documents: that the model has seen.
    """

    def __init__(self, tokenizer: Tokenizer, settings: SampleSettings, documents: int) -> None:
        self.tokenizer, self.settings, self.documents = tokenizer, settings, documents

    def read(self, text: str) -> Prompt:
        """The prompt of a text, under the newline rule of the training text.

        Raises:
            UserError: the tokenizer lacks a character of it.
        """
        text = same_newlines(text)
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            raise UserError("a prompt holds half a surrogate pair, which is no character") from None
        if not text:
            return Prompt(text, [start_of_document(self.tokenizer, self.documents)])
        return Prompt(text, self.tokenizer.encode(text, parse_special=self.settings.parse_special).tolist())


def print_completions(model: GPT, tokenizer: Tokenizer, prompts: list[Prompt], settings: SampleSettings) -> list[int]:
    """Print every completion of every prompt, so many at once as the settings say; the ids of the last one."""
    jobs = [(number, sample) for number in range(len(prompts)) for sample in range(settings.num_samples)]
    next_logits, last = None, []
    for start in range(0, len(jobs), settings.batch_size):
        batch = jobs[start : start + settings.batch_size]
        ids = [prompts[number].ids for number, _ in batch]
        if next_logits is None or len(batch) < settings.batch_size:
            positions = max(len(prompt.ids) for prompt in prompts) + settings.max_new_tokens
            next_logits = NextLogits(model, len(batch), kv_cache=settings.kv_cache, positions=positions)
        completions = Completions(model, tokenizer, ids, [sample for _, sample in batch], settings, next_logits)
        try:
            if settings.logprobs:
                print_records(completions, batch)
            else:
                print_texts(completions, batch, prompts, settings)
        except FloatingPointError as error:
            print(flush=True)
            raise UserError(f"{error}: the checkpoint's weights are broken; sample from an earlier one") from None
        last = completions.ids[-1]
    return last


def print_texts(
    completions: Completions, batch: list[tuple[int, int]], prompts: list[Prompt], settings: SampleSettings
) -> None:
    """Print a batch of completions: a single one piece by piece, several when they are done."""

    def begin(number: int, sample: int) -> None:
        places = [("prompt", number, len(prompts)), ("sample", sample, settings.num_samples)]
        several = [f"{name} {place + 1} of {total}" for name, place, total in places if total > 1]
        if several:
            print(f"--- {', '.join(several)}")
        print(prompts[number].text if settings.echo else "", end="", flush=True)

    if len(batch) == 1:
        begin(*batch[0])
        for (piece,) in completions:
            print(piece, end="", flush=True)
        print(flush=True)
        return
    steps = list(completions)
    for row, (number, sample) in enumerate(batch):
        begin(number, sample)
        print("".join(pieces[row] for pieces in steps), flush=True)


def print_records(completions: Completions, batch: list[tuple[int, int]]) -> None:
    """Print a line of JSON for each token that is made."""
    counts = [0] * len(batch)
    for _ in completions:
        for row, (number, sample) in enumerate(batch):
            if len(completions.ids[row]) > counts[row]:
                place = {"prompt": number, "sample": sample, "index": counts[row]}
                print(json.dumps({**place, **completions.token_record(row)}, ensure_ascii=False), flush=True)
                counts[row] += 1


def refuse_page_without_place(page: str) -> None:
    """Find out before anything is generated.

    Raises:
        UserError: the page cannot be written where it should go.
    """
    if page and (Path(page).suffix not in (".html", ".htm") or not Path(page).parent.is_dir()):
        raise UserError(f"attention_page = {page}: expected a name that ends in .html, in a folder that exists")


def checkpoint_path(settings: SampleSettings) -> Path:
    """The file to sample from: the one named, or the best (else the last) of the run named, or of the newest run.

    Raises:
        UserError: there is no checkpoint there.
    """
    if settings.checkpoint or settings.out_dir:
        return newest_checkpoint(Path(settings.checkpoint or settings.out_dir))
    saved = sorted(Path("runs").glob("*/last.pt"), key=lambda file: file.stat().st_mtime)
    if not saved:
        raise UserError("runs: there is no trained run here; train one with train.py, or name it with --out_dir")
    return newest_checkpoint(saved[-1].parent)


def prompt_texts(settings: SampleSettings) -> list[str]:
    """The texts to continue.

    Raises:
        UserError: a file of prompts cannot be read, or holds none.
    """
    if settings.prompt_file:
        return [text_of(settings.prompt_file)]
    if not settings.prompts_file:
        return [settings.prompt]
    lines = same_newlines(text_of(settings.prompts_file)).split("\n")
    if settings.prompts_file.endswith(".jsonl"):
        numbered = enumerate(lines, start=1)
        lines = [json_prompt(line, f"{settings.prompts_file}: line {i}") for i, line in numbered if line.strip()]
    else:
        lines = [line for line in lines if line]
    if not lines:
        raise UserError(f"{settings.prompts_file}: holds no prompts; expected a text in each line")
    return lines


def json_prompt(line: str, place: str) -> str:
    """The prompt of a line of a .jsonl file.

    Raises:
        UserError: there is none.
    """
    try:
        prompt = json.loads(line)["prompt"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(f"{place}: expected a JSON object with a prompt ({reason_of(error)})") from None
    if not isinstance(prompt, str):
        raise UserError(f"{place}: its prompt is no text")
    return prompt


def text_of(name: str) -> str:
    """The text of a file of prompts.

    Raises:
        UserError: it cannot be read.
    """
    try:
        return Path(name).read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise UserError(f"{name}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{name}: not UTF-8 text (byte {error.start}: {error.reason})") from None


def asked_texts() -> Iterator[bytes]:
    """One text after another, as they are typed, until the input ends.

    Raises:
        UserError: there is no standard input.
    """
    if sys.stdin is None:
        raise UserError("standard input: is closed; expected texts to continue on it")
    while True:
        note("prompt (an empty line ends):")
        line = sys.stdin.buffer.readline().rstrip(b"\r\n")
        if not line:
            return
        yield line


def note(line: str) -> None:
    """Tell the reader something without touching the text on standard output."""
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    run_command(main)
