"""tokenizer.json, the format that `transformers` and serving engines read, of a sentencepiece byte-pair model.

Written as plain JSON, without the `tokenizers` package. Ids equal those of the sentencepiece model for any text that
spells neither a control token (servers give it its id) nor U+2581, the escape of a space.
"""

from __future__ import annotations

from trace_jax.policy.tokenizer import SentencePieceTokenizer

_SPACE = "\u2581"


def tokenizer_json(tokenizer: SentencePieceTokenizer) -> dict:
    """The content of tokenizer.json."""
    kinds, pieces, scores = tokenizer.kinds, tokenizer.pieces, tokenizer.scores
    # Symbols given to the trainer are matched before normalisation, so they are spelled with plain spaces.
    pieces = [p.replace(_SPACE, " ") if kind == "user" else p for p, kind in zip(pieces, kinds, strict=True)]
    vocabulary = {piece: token for token, piece in enumerate(pieces)}
    added = [
        {
            "id": token,
            "content": pieces[token],
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kinds[token] == "control",
        }
        for token in range(len(pieces))
        if kinds[token] in ("control", "user")
    ]
    normal = {piece: token for piece, token in vocabulary.items() if kinds[token] == "normal"}
    # A merge is tried in the order of the score of what it makes, as in the sentencepiece model.
    merges = []
    for piece in sorted(normal, key=lambda piece: -scores[normal[piece]]):
        splits = [(piece[:i], piece[i:]) for i in range(1, len(piece))]
        merges += sorted((a, b) for a, b in splits if a in normal and b in normal)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE},
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
            ],
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": "<unk>",
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": vocabulary,
            "merges": [list(pair) for pair in merges],
        },
    }
