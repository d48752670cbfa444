"""The regular expressions that cut text into the parts within which BPE merges.

Knows at which places a longer text may be cut in two, and how to put an expression so that it is matched quickly.
"""

import re

# GPT-2's pattern (Radford et al. 2019), which Hugging Face's ByteLevel has built in.
GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# Ours: the same with numbers cut into threes, and with a bound on white space, whose unbounded form overflows the
# stack of the regex engine on about a million blanks in a row.
BPE_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++|\s{1,256}(?!\S)|\s"
# Places where a pattern of this family has a token border, whatever comes before or after: between a visible
# character and a blank or a line break; where the pattern joins punctuation to line breaks (OpenAI's later ones),
# between a letter or digit and a line break.
SAFE_CUT = re.compile(r"\S(?=[ \n])")
SAFE_CUT_JOINED_LINES = re.compile(r"\S(?= )|[^\W_](?=\n)")

# What a pattern is made of: escapes, character classes, the openings of groups, repetitions, and single characters.
TIMES = r"(?:[*+?]|\{\d+(?:,\d*)?\})"
REPETITION = TIMES + "[+?]?"
PARTS = re.compile(
    r"\\[pPxuUkg]\{[^}]*\}|\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\(\?(?:<?[=!]|>|\(|#|[\w-]*[:)])|" + REPETITION + "|.",
    re.DOTALL,
)
SEARCHED_BY_STEPS = re.compile(r"\(\?(?:<?[=!]|>|\()|\\[1-9kgKGZ]")  # parts that an automaton does not know


def last_safe_cut(text: str, pattern: str) -> int:
    """How many leading characters a BPE with this pattern can encode on their own; 0 when there is no place to cut."""
    cut = SAFE_CUT_JOINED_LINES if r"[\r\n" in pattern else SAFE_CUT
    for window in (4096, len(text)):  # nearly always the first finds one
        ends = [match.end() for match in cut.finditer(text, max(0, len(text) - window))]
        if ends:
            return ends[-1]
    return 0


def quick_form(pattern: str) -> str:
    """A pattern with the same matches, which the engine of tiktoken and rustbpe finds with fewer searches.

    That engine (fancy-regex) tries alternative after alternative, each with a search of its own, as soon as one has a
    lookahead or a possessive repetition. Neighbours without any are one search when they stand in a group of their
    own; and a repetition that ends an alternative need not be possessive, as nothing follows to which it could give
    back. What is not understood for certain stays as it is.
    """
    alternatives: list[list[str]] = [[]]
    depth, previous = 0, "|"
    for part in PARTS.findall(pattern):
        depth += part.startswith("(") - part.startswith(")")
        if depth < 0 or not _is_understood(part, previous):
            return pattern
        if part == "|" and depth == 0:
            alternatives.append([])
        else:
            alternatives[-1].append(part)
        previous = part
    if depth:
        return pattern
    grouped: list[str] = []
    neighbours: list[str] = []
    for alternative in alternatives:
        simple = [*alternative[:-1], _not_possessive(alternative[-1])] if alternative else []
        if any(SEARCHED_BY_STEPS.match(part) or part != _not_possessive(part) for part in simple):
            grouped += [*_in_a_group(neighbours), "".join(alternative)]
            neighbours = []
        else:
            neighbours.append("".join(simple))
    return "|".join([*grouped, *_in_a_group(neighbours)])


def _is_understood(part: str, previous: str) -> bool:
    """Whether a part of a pattern means here what it seems to mean."""
    if part.startswith("(?"):
        return not (part.endswith((")", "#")) or "x" in part)  # flags or a comment, which change what follows
    if part.startswith("["):
        return "[" not in part[1:]  # a class in a class
    if re.fullmatch(REPETITION, part):
        least, _, most = part.strip("{}+?").partition(",")
        misplaced = previous == "|" or previous.startswith("(") or re.fullmatch(REPETITION, previous)
        return not misplaced and not (most and int(least) > int(most))
    return part not in ("{", "}")


def _not_possessive(part: str) -> str:
    return part[:-1] if re.fullmatch(TIMES + r"\+", part) else part


def _in_a_group(alternatives: list[str]) -> list[str]:
    return [f"(?:{'|'.join(alternatives)})"] if len(alternatives) > 1 else alternatives
