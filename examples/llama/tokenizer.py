"""Trains a BPE tokenizer on text files: `python tokenizer.py FOLDER FILE…`. The same files give the same tokenizer."""

import argparse
import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCABULARY = 512
# A token that ends documents and messages, and one that begins each message. Their numbers are 0, 1 and 2.
END = "<|end|>"
SPECIAL = [END, "<|user|>", "<|assistant|>"]
CHAT_TEMPLATE = """\
{%- for message in messages %}
{{- '<|' + message.role + '|>' + message.content + '<|end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|assistant|>' }}
{%- endif %}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("files", type=Path, nargs="+")
    given = parser.parse_args()

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIAL,
        # All 256 bytes, so that every text has tokens.
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [file.read_text(encoding="utf-8") for file in sorted(given.files)]
    tokenizer.train_from_iterator(texts, trainer)

    given.folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(given.folder / "tokenizer.json"))
    described = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "pad_token": END}
    (given.folder / "tokenizer_config.json").write_text(json.dumps(described, indent=2) + "\n")
    (given.folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    print(f"{given.folder}: {tokenizer.get_vocab_size()} tokens from {len(texts)} files")


if __name__ == "__main__":
    main()
