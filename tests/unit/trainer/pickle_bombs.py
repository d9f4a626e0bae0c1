"""`.metadata` files by hand, instruction for instruction (see pickletools), that try to cost a lot."""

import pickle
import struct


def assembled(*parts: bytes) -> bytes:
    """A pickle of protocol 4 made of these instructions."""
    return b"\x80\x04" + b"".join(parts) + b"."


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def named(module: str, name: str) -> bytes:
    return text(module) + text(name) + b"\x93"


def again(at: int) -> bytes:
    """What the memo has at this place."""
    return b"h" + bytes([at])


TORCHS = "torch.distributed.checkpoint.metadata"
DEEP = b")" + b"\x85" * 1_000_000


def doubled(times: int) -> bytes:
    """A tuple that holds the one before twice, and so on: to hash or to print it takes 2 ** times steps."""
    return b")\x94" + b"".join(again(at) + b"\x86\x94" for at in range(times))


FEW, MANY = doubled(5), doubled(100)
INDEX = named(TORCHS, "MetadataIndex") + b")\x81"
PLACE = named("torch.distributed.checkpoint.filesystem", "_StorageInfo") + b")\x81"
METADATA = named(TORCHS, "Metadata") + b")\x81"
WIDE = named("torch", "Size") + b"(" + b"K\x00" * 1_000_000 + b"t\x85R"
"""A size of so many dimensions that to hash it again and again takes for ever."""


def fields(*items: bytes) -> bytes:
    """What the object before them has."""
    return b"}(" + b"".join(items) + b"ub"


def shared(parts: int) -> bytes:
    """A tensor of one part, so many times over, which stands in the memo then."""
    size = named("torch", "Size") + b")\x85R"
    properties = named(TORCHS, "TensorProperties") + b")\x81" + fields(text("dtype"), named("torch", "float32"))
    part = named(TORCHS, "ChunkStorageMetadata") + b")\x81" + fields(text("offsets"), size, text("sizes"), size)
    chunks = b"](" + part + b"\x94" + b"h\x00" * (parts - 1) + b"e"
    tensor = fields(text("properties"), properties, text("size"), size, text("chunks"), chunks)
    return named(TORCHS, "TensorStorageMetadata") + b")\x81" + tensor + b"\x94"


def long_paths(levels: int) -> bytes:
    """A path of 100 letters, then ten times over at each level."""
    level = named("pathlib", "PosixPath") + b"(%bt" + b"R\x94"
    return text("a" * 100) + b"\x94" + b"".join(level % (again(at) * 10) for at in range(levels))


def alike(dimensions: int) -> bytes:
    """2 ** dimensions keys that differ, and have one hash value: numbers count modulo 2 ** 61 - 1 there."""
    two = b"K\x00\x94", b"\x8a\x08" + struct.pack("<q", 2**61 - 1) + b"\x94"
    begin = named(TORCHS, "MetadataIndex") + b"\x94" + text("fqn") + b"\x94" + text("offset") + b"\x94"
    begin += named("torch", "Size") + b"\x94" + b"".join(two)
    keys = (
        b"h\x00)\x81}(h\x01h\x01h\x02h\x03("
        + b"".join(again(4 + (number >> bit & 1)) for bit in range(dimensions))
        + b"t\x85RubN"
        for number in range(2**dimensions)
    )
    return begin + b"}(" + b"".join(keys) + b"u"


def indexed(*more: bytes) -> bytes:
    """A key of storage_data with these fields, in a dictionary."""
    return b"}" + INDEX + fields(text("fqn"), text("x"), *more) + b"Ns"


CHANGES = "a list, dictionary or object that changes after it was named again"
AGAIN = "things that come to more than"
BOMBS = {
    "nothing": (b"", "something else: IndexError"),
    "no instruction": (b"garbage", "the pickle instruction 0x67 at byte 0"),
    "an end too early": (b"\x80\x04X\xff\xff\xff\x7fabc", "an end in the midst of a value"),
    "another object": (pickle.dumps({"model": 1}), "an object of type dict"),
    "a place far beyond in the memo": (assembled(b"Nj\xff\xff\xff\x7f"), "something else: IndexError"),
    "an unknown instruction": (assembled(b"Nr\xff\xff\xff\x7f"), "the pickle instruction 0x72 at byte 3"),
    "gigabytes of zeros": (assembled(b"\x96" + struct.pack("<Q", 2**40)), "the pickle instruction 0x96 at byte 2"),
    "a long number": (assembled(b"\x8b" + struct.pack("<i", 2**30)), "the pickle instruction 0x8b at byte 2"),
    "a number of 255 bytes": (assembled(b"\x8a\xff" + b"\0" * 255), "a number of 255 bytes"),
    "a tuple of what is not there": (assembled(b"N\x87"), "a tuple of nothing"),
    "a key without a dictionary": (assembled(b"NNNs"), "a key without a dictionary"),
    "a key without a value": (assembled(b"}(", text("a"), b"u"), "something else: ValueError"),
    "an item without a list": (assembled(b"NNa"), "an item without a list"),
    "deep as a key": (assembled(b"}", DEEP, b"Ns"), "a key that is no name"),
    "doubled": (assembled(MANY), AGAIN),
    "doubled as a key": (assembled(b"}", FEW, b"Ns"), "a key that is no name"),
    "doubled in a key": (
        assembled(b"}", INDEX, fields(text("fqn"), FEW), b"Ns"),
        "a name in `storage_data` of type tuple, expected str",
    ),
    "doubled beside a key": (
        assembled(indexed(text("index"), FEW)), "an index in `storage_data` of type tuple, expected int",
    ),
    "doubled as an offset": (
        assembled(indexed(text("offset"), FEW)), "an offset in `storage_data` of type tuple, expected Size",
    ),
    "doubled in an encoding": (
        assembled(named(TORCHS, "_MEM_FORMAT_ENCODING"), FEW, b"\x85R"), "a memory format that is no number",
    ),
    "doubled as a layout": (
        assembled(named("torch.serialization", "_get_layout"), FEW, b"\x85R"), "a tensor that is not strided",
    ),
    "doubled as a memory format": (
        assembled(
            named(TORCHS, "TensorProperties"), b")\x81(", named("torch", "float32"), b"N\x89", FEW, b"\x89tb",
        ),
        "the format of a tensor without a memory format",
    ),
    "a format of no values": (
        assembled(named(TORCHS, "TensorProperties"), b")\x81)b"), "the format of a tensor without a memory format",
    ),
    "doubled in the name of a field": (
        assembled(METADATA, b"}", INDEX, fields(text("fqn"), text("x")), b"Nsb"), "a field of Metadata without a name",
    ),
    "doubled as the name of a tensor": (
        assembled(METADATA, fields(text("state_dict_metadata"), b"}" + INDEX + fields(text("fqn"), text("x")) + b"Ns")),
        "a name of type MetadataIndex, expected str",
    ),
    "doubled as the object": (assembled(FEW), "an object of type tuple"),
    "doubled by lists": (
        assembled(b"]\x94", b"".join(b"](" + again(at) + again(at) + b"e\x94" for at in range(100))),
        AGAIN,
    ),
    "doubled by dictionaries": (
        assembled(
            b"}\x94", b"".join(
                b"}(" + text("a") + again(at) + text("b") + again(at) + b"u\x94" for at in range(100)
            ),
        ),
        AGAIN,
    ),
    "doubled by objects": (
        assembled(
            METADATA, b"\x94",
            b"".join(
                METADATA + fields(text("version"), again(at), text("planner_data"), again(at)) + b"\x94"
                for at in range(100)
            ),
        ),
        AGAIN,
    ),
    "paths of paths": (assembled(long_paths(8)), "an object of type str"),
    "a text again and again": (assembled(text("a" * 100_000), b"\x94(", b"h\x00" * 100_000, b"t"), AGAIN),
    "keys of one hash value": (assembled(alike(16)), "keys that cannot be told apart by their hash values"),
    "few bytes for each": (assembled(b"}" * 100_000), AGAIN),
    "a list that grows after it is named again": (
        assembled(b"]\x94h\x00Na"), CHANGES,
    ),
    "a dictionary that grows after it is named again": (
        assembled(b"}\x94h\x00", text("a"), b"Ns"), CHANGES,
    ),
    "an object that changes after it was named again": (
        assembled(METADATA, b"\x94h\x00", fields(text("version"), b"N")),
        CHANGES,
    ),
    "fields of a class": (
        assembled(named(TORCHS, "Metadata"), fields(text("version"), b"N")), "fields of something else than a class of",
    ),
    "slots of an object": (
        assembled(METADATA, b"N}", text("__class__"), b"Ns\x86b"), "fields of something else than a class of",
    ),
    "a field that none has": (
        assembled(METADATA, fields(text("__class__"), b"N")), "the field `__class__` of Metadata, unknown to torch",
    ),
    "an object of a function": (
        assembled(named("torch", "Size"), b")\x81"), "an object of something else than a class of",
    ),
    "an attribute": (
        assembled(named("builtins", "getattr"), named(TORCHS, "Metadata"), text("__init__"), b"\x86R"),
        "getattr of something else than a memory format",
    ),
    "a call of a class": (assembled(named(TORCHS, "Metadata"), b")R"), "a call of something else than a size"),
    "an import": (
        assembled(named("antigravity", "webbrowser")),
        "`antigravity.webbrowser`, which is no part of a checkpoint's metadata",
    ),
    "a late import of torch": (
        assembled(named("torch", "onnx")), "`torch.onnx`, which is no part of a checkpoint's metadata",
    ),
    "a dotted name": (
        assembled(named(TORCHS, "Metadata.__init__.__globals__")),
        f"`{TORCHS}.Metadata.__init__.__globals__`, which is no part of",
    ),
    "a class without a name": (assembled(text("torch"), b"N\x93"), "a class without a name"),
    "a persistent object": (assembled(text("x"), b"Q"), "the pickle instruction 0x51 at byte 8"),
    "an extension": (assembled(b"\x82\x01"), "the pickle instruction 0x82 at byte 2"),
    "no fields": (assembled(METADATA), "`state_dict_metadata` of type NoneType, expected dict"),
    "a size of a million dimensions": (assembled(WIDE), "a size of 1000000 dimensions"),
    "a tensor of one part many times over": (
        assembled(METADATA, fields(text("state_dict_metadata"), b"}(" + text("x") + shared(100_000) + b"u")),
        "100000 parts of tensors in a file of",
    ),
    "one list of parts for many tensors": (
        assembled(
            METADATA,
            fields(
                text("state_dict_metadata"),
                b"}(" + text("x") + shared(1000) + b"".join(text(str(at)) + b"h\x01" for at in range(100_000)) + b"u",
            ),
        ),
        AGAIN,
    ),
    "a negative size": (
        assembled(named("torch", "Size"), b"J\xff\xff\xff\xff\x85\x85R"), "a size that is not made of whole numbers",
    ),
    "a format of many kinds": (
        assembled(
            METADATA,
            fields(
                text("state_dict_metadata"),
                b"}" + text("x") + named(TORCHS, "TensorStorageMetadata") + b")\x81" + fields(
                    text("chunks"), b"]", text("size"), named("torch", "Size") + b")\x85R", text("properties"),
                    named(TORCHS, "TensorProperties") + b")\x81" + fields(
                        text("dtype"), named("torch", "float32"), text("layout"), FEW
                    ),
                ) + b"s",
            ),
        ),
        "`layout` of `x` of type tuple, expected layout",
    ),
    "a place without a file": (
        assembled(
            METADATA,
            fields(
                text("state_dict_metadata"), b"}", text("storage_data"),
                b"}" + INDEX + fields(text("fqn"), text("x")) + PLACE + fields(text("relative_path"), FEW) + b"s",
            ),
        ),
        "the name of a file of type tuple, expected str",
    ),
}  # fmt: skip
"""What the file holds, and how the sentence begins that says so."""
