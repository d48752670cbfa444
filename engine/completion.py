"""From prompts to completions: token ids to text, several rows at once, each with its own end.

Knows models, tokenizers and the settings of sampling; prints nothing.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from config.schema import SampleSettings
from data.tokenizers import Tokenizer
from engine.decoding import NextLogits
from engine.generation import generate, left_padded
from engine.text_stream import TextStream
from model import GPT

GENERATION_SETTINGS = {
    "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed", "kv_cache", "context_shift",
}  # fmt: skip


class Completions:
    """The completions of some prompts, made together; each text is what it would be alone.

    Args:
        model: in any mode.
        tokenizer: of the model.
        prompts: token ids of each row, at least one.
        samples: the number of each row's random stream.
        settings: of the sampling.
        next_logits: made earlier for this model and as many rows.

    Attributes:
        ids: of the tokens made so far, a list a row; a row's list ends with the token that ended its text.
    """

    def __init__(
        self,
        model: GPT,
        tokenizer: Tokenizer,
        prompts: Sequence[Sequence[int]],
        samples: Sequence[int],
        settings: SampleSettings,
        next_logits: NextLogits | None = None,
    ) -> None:
        self.model, self.tokenizer, self.prompts, self.samples = model, tokenizer, prompts, samples
        self.settings, self.next_logits = settings, next_logits
        self.ids: list[list[int]] = [[] for _ in prompts]
        self.log_probabilities: Tensor | None = None  # (B, V) of the last step, kept where they are asked for

    def __iter__(self) -> Iterator[list[str]]:
        """Text as it becomes known, a piece a row at each step, until every row has ended.

        Raises:
            FloatingPointError: the logits are not finite.
        """
        settings = self.settings
        options: dict[str, Any] = settings.model_dump(include=GENERATION_SETTINGS)
        streams = [
            TextStream(self.tokenizer, stop=settings.stop, show_special=settings.show_special) for _ in self.prompts
        ]
        prompt, padding = left_padded(self.prompts, self.model.device)
        for step in generate(
            self.model,
            prompt,
            settings.max_new_tokens,
            padding=padding,
            samples=self.samples,
            next_logits=self.next_logits,
            observe=self._keep if settings.logprobs else None,
            **options,
        ):
            for row, token in enumerate(step.tolist()):
                if not streams[row].ended:
                    self.ids[row].append(token)
            yield [stream.feed(token) for stream, token in zip(streams, step.tolist(), strict=True)]
            if all(stream.ended for stream in streams):
                return
        yield [stream.finish() for stream in streams]

    def _keep(self, logits: Tensor, chosen: Tensor) -> None:
        self.log_probabilities = logits.float().log_softmax(dim=-1).cpu()

    def token_record(self, row: int) -> dict[str, Any]:
        """A row's last token with its log probability (in nats, as the model gives it), and the likeliest ones.

        Only while iterating, and where the settings ask for it.
        """
        assert self.log_probabilities is not None
        likeliest = torch.topk(self.log_probabilities[row], min(self.settings.logprobs, self.tokenizer.vocab_size))
        top = [self._described(row, token) for token in likeliest.indices.tolist()]
        return {**self._described(row, self.ids[row][-1]), "top": top}

    def _described(self, row: int, token: int) -> dict[str, Any]:
        assert self.log_probabilities is not None
        content = self.tokenizer.token_bytes[token]
        return {
            "id": token,
            "text": content.decode("utf-8", errors="replace"),
            "bytes": list(content),
            "logprob": self.log_probabilities[row, token].item(),
        }
