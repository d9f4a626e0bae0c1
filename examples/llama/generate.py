"""Generates text with an exported model: `python generate.py MODEL TEXT`, with a LoRA adapter `--adapter FOLDER`.

Without an adapter the model continues TEXT. With one, TEXT is a question, which the model answers without and with it.
"""

import argparse

from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, BatchEncoding, PreTrainedModel, PreTrainedTokenizerBase

NEW_TOKENS = 40


def generated(model: PreTrainedModel | PeftModel, tokenizer: PreTrainedTokenizerBase, prompt: BatchEncoding) -> str:
    """Return the most probable continuation of a prompt, up to the end token."""
    tokens = model.generate(**prompt, max_new_tokens=NEW_TOKENS, do_sample=False)
    return tokenizer.decode(tokens[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("text")
    parser.add_argument("--adapter")
    given = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(given.model)
    model = AutoModelForCausalLM.from_pretrained(given.model)
    if given.adapter is None:
        prompt = tokenizer(given.text, return_tensors="pt", return_token_type_ids=False)
        print(given.text + generated(model, tokenizer, prompt))
        return
    question = [{"role": "user", "content": given.text}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    print("without the adapter:", generated(model, tokenizer, prompt), sep="\n")
    adapted = PeftModel.from_pretrained(model, given.adapter)
    print("with the adapter:", generated(adapted, tokenizer, prompt), sep="\n")


if __name__ == "__main__":
    main()
