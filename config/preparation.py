"""The settings of prepare.py: apart from the others, as it needs no model and so need not wait for torch."""

from pydantic import Field

from config.fields import Number, Settings, Whole


class PreparationFields(Settings):
    """How text becomes tokens; shared by prepare.py and by train.py --text."""

    tokenizer: str = Field(
        "bpe",
        description="char, byte, bpe (trained on the text), a tiktoken encoding such as gpt2, or a tokenizer file",
        min_length=1,
    )
    vocab_size: Whole = Field(2048, ge=257, le=2**20, description="ids of a bpe vocabulary, end-of-text included")
    val_fraction: Number = Field(0.1, ge=0, lt=1, description="share of the tokens, at the end, kept for validation")
    encoding: str = Field("utf-8", description="character encoding of the text files")
    text_field: str = Field("text", min_length=1, description="the field of .jsonl files that holds the text")
    parse_special: bool = Field(
        False, description="read <|endoftext|> in the text as the end-of-text id; otherwise it is plain text"
    )


class PrepareSettings(PreparationFields):
    """prepare.py: text -> tokens on disk."""

    positional = "source"

    source: str = Field(
        "stdlib",
        min_length=1,
        description="a file, a folder, a quoted glob, - for standard input, or a built-in text: stdlib, shakespeare",
    )
    out_dir: str = Field("", description="where the tokens go (empty: a folder under data/prepared, named after both)")
