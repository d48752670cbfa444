"""Where a text without a prompt starts; and from token ids, as they are made, to text that can be printed at once.

Never half a character, never the beginning of a stop string, never what comes after one.
"""

import codecs
from collections.abc import Iterable, Iterator, Sequence

from data.tokenizers import Tokenizer, length_of_begun


def start_of_document(tokenizer: Tokenizer, documents: int) -> int:
    """The id after which a document starts.

    End-of-text where the model has seen documents begin there; a model of a single document has not, so a line break
    stands in, or the vocabulary's first id where it has no line break.

    Args:
        tokenizer: of the model.
        documents: that the model was trained on.
    """
    if documents > 1:
        return tokenizer.end_of_text
    return tokenizer.token_bytes.index(b"\n") if b"\n" in tokenizer.token_bytes else 0


class TextStream:
    """The text of one completion, fed with token ids as they are generated.

    It ends before the first stop string (wherever its token borders are) or at the end-of-text id.

    Args:
        tokenizer: of the ids.
        stop: texts to end before.
        show_special: give END_OF_TEXT where it was sampled.
    """

    def __init__(self, tokenizer: Tokenizer, *, stop: Sequence[str] = (), show_special: bool = False) -> None:
        self.tokenizer, self.stop, self.show_special = tokenizer, stop, show_special
        self.decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.held = ""  # decoded, but perhaps the beginning of a stop string
        self.ended = False

    def feed(self, token: int) -> str:
        """The text that is known for certain with this id; "" once the text has ended."""
        if self.ended:
            return ""
        is_end = token == self.tokenizer.end_of_text
        if not is_end or self.show_special:
            self.held += self.decoder.decode(self.tokenizer.token_bytes[token])
        if is_end or _first_stop(self.held, self.stop) is not None:
            return self.finish()
        safe = len(self.held) - length_of_begun(self.held, self.stop)
        text, self.held = self.held[:safe], self.held[safe:]
        return text

    def finish(self) -> str:
        """The rest, when no more ids come; bytes that make no UTF-8 character by then are U+FFFD."""
        if self.ended:
            return ""
        self.ended = True
        if _first_stop(self.held, self.stop) is None:
            self.held += self.decoder.decode(b"", final=True)
        return self.held[: _first_stop(self.held, self.stop)]


def stream_text(
    ids: Iterable[int], tokenizer: Tokenizer, *, stop: Sequence[str] = (), show_special: bool = False
) -> Iterator[str]:
    """Text of a completion, in pieces; the pieces joined are the whole. No more ids are taken after the end.

    Args:
        ids: token ids as they are generated.
        tokenizer, stop, show_special: as `TextStream`.
    """
    stream = TextStream(tokenizer, stop=stop, show_special=show_special)
    for token in ids:
        if piece := stream.feed(token):
            yield piece
        if stream.ended:
            return
    if piece := stream.finish():
        yield piece


def _first_stop(text: str, stop: Sequence[str]) -> int | None:
    places = [place for place in (text.find(marker) for marker in stop) if place >= 0]
    return min(places, default=None)
