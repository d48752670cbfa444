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


def stream_text(
    ids: Iterable[int], tokenizer: Tokenizer, *, stop: Sequence[str] = (), show_special: bool = False
) -> Iterator[str]:
    """Text of a completion, in pieces; the pieces joined are the whole.

    Ends at the first stop string (which is not part of the text, wherever its token borders are) or at the
    end-of-text id. Bytes that make no UTF-8 character by then come last, as U+FFFD.

    Args:
        ids: token ids as they are generated; no more are taken after the end.
        tokenizer: theirs.
        stop: texts to end before.
        show_special: give END_OF_TEXT where it was sampled.
    """
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    held = ""  # decoded, but perhaps the beginning of a stop string
    for token in ids:
        ended = token == tokenizer.end_of_text
        if not ended or show_special:
            held += decoder.decode(tokenizer.token_bytes[token])
        found = _first_stop(held, stop)
        if found is not None:
            yield held[:found]
            return
        if ended:
            break
        safe = len(held) - length_of_begun(held, stop)
        if safe:
            yield held[:safe]
            held = held[safe:]
    held += decoder.decode(b"", final=True)
    found = _first_stop(held, stop)
    if held[:found]:
        yield held[:found]


def _first_stop(text: str, stop: Sequence[str]) -> int | None:
    places = [place for place in (text.find(marker) for marker in stop) if place >= 0]
    return min(places, default=None)
