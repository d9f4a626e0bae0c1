"""Texts that mean, or cost, far more than they say: each with the sentence that refuses it, and with no other."""

from disttrain_api.yaml_bounds import MAX_BYTES, MAX_DEPTH, MAX_DOCUMENTS, MAX_KEY, MAX_MERGED, MAX_NUMBER, MAX_VALUES

BYTES = f"needs more than {MAX_BYTES} bytes, with each alias expanded"
VALUES = f"more than {MAX_VALUES} values"
DOCUMENTS = f"more than {MAX_DOCUMENTS} documents"
DEPTH = f"nested more than {MAX_DEPTH} levels deep"

LONG = 100_000
A_LONG_NUMBER = f"a number of {LONG} characters, and may have at most {MAX_NUMBER}"


def doubled(item: str, levels: int, *, times: int = 10, merge: bool = False) -> str:
    """An item that an anchor repeats `times` times, and the next one that, and so on."""
    text = f"a0: &a0 {item}\n"
    for level in range(1, levels):
        named = ", ".join([f"*a{level - 1}"] * times)
        text += f"a{level}: &a{level} " + (f"{{<<: [{named}]}}\n" if merge else f"[{named}]\n")
    return text


def keys(count: int, length: int) -> str:
    return "{" + ", ".join(f"k{number:0{length - 1}}: 1" for number in range(count)) + "}"


# Read as a manifest and as any other file alike.
BOMBS = {
    "a string by 60,000 aliases": (f"a: &a {'x' * 20_000}\nb: [{'*a,' * 60_000}]\n", BYTES),
    "a string of other letters": (f"a: &a {'é' * 20_000}\nb: [{'*a,' * 30}]\n", BYTES),
    "a string that aliases double": (doubled("x" * 20_000, 10), BYTES),
    "keys that aliases double": (doubled(keys(20, 1000), 4), BYTES),
    "a key by aliases": (f"? &a {'x' * 1000}\n: 1\nb: [{'{? *a : 1}, ' * 1100}]\n", BYTES),
    "values that aliases double": (doubled("[1, 2, 3]", 6), VALUES),
    "objects that merge keys double": (doubled(keys(20, 3), 5, merge=True), VALUES),
    "long keys that merge keys double": (doubled(keys(20, 1000), 4, merge=True), BYTES),
    "lists in lists": ("[" * LONG, DEPTH),
    "objects in objects": ("{a: " * LONG, DEPTH),
    "keys in keys": ("? " * LONG, DEPTH),
    "lists in lists by aliases": ("".join(f"- &a{n} [*a{n - 1}]\n" if n else "- &a0 [x]\n" for n in range(400)), DEPTH),
    "a long key": (f"? {'x' * LONG}\n: 1\n", f"a key of {LONG} characters, and may have at most {MAX_KEY}"),
    "a long integer": (f"a: {'1' * LONG}\n", A_LONG_NUMBER),
    "a long fraction": (f"a: 0.{'1' * (LONG - 2)}\n", A_LONG_NUMBER),
    "many documents": ("---\na: 1\n" * LONG, DOCUMENTS),
    "many empty documents": ("---\n" * LONG, DOCUMENTS),
}
"""By name: the text, and the sentence that refuses it."""

OF_MANIFESTS = {
    # Shared code refuses it, and takes seconds.
    "more values than a job has": (f"[{'x,' * 500_000}]", VALUES),
    "a large exponent": ("a: 1e999999", "1e999999 is not a finite number"),
    "a long exponent": (f"a: 1e{'9' * (LONG - 2)}\n", A_LONG_NUMBER),
    "a large integer": (f"a: {'1' * 500}", f"{'1' * 40} is too large for an integer"),
    "many merged objects": (
        f"a: &a {{k: 1}}\nb: {{<<: [{'*a,' * 1000}]}}\n",
        f"`<<` takes over 1000 objects, and may take over at most {MAX_MERGED}",
    ),
    "many merge keys": (f"a: &a {keys(20, 3)}\nb: {{{'<<: *a, ' * 5000}}}\n", VALUES),
    "a long word of two meanings": (f"a: 0{'1' * LONG}", f"0{'1' * 38}… means one thing to YAML 1.2"),
    "a long tag": (f"a: !{'x' * LONG} 1", f"tag !{'x' * 78}… is not supported"),
    "a long alias": (f"a: *{'x' * LONG}", f"not YAML: found undefined alias '{'x' * 80}"),
    "a long key that is no string": (f"? 0{'1' * 1000}\n: 1", f"key 0{'1' * 78}… is not a string"),
    "a long key that is given twice": (
        f"? {'x' * 1000}\n: 1\n? {'x' * 1000}\n: 2",
        f"key `{'x' * 79}…` is given twice, in lines 1 and 3",
    ),
}
"""Those of manifests alone."""
OF_OTHER_FILES = {"a long integer of base sixty": (f"a: 10{':1' * (LONG // 2 - 1)}\n", A_LONG_NUMBER)}
"""Those of other files alone."""
