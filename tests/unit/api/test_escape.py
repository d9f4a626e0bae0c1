"""What others have written is text wherever it is shown."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disttrain_api.escape import escaped
from disttrain_api.structural import describe, shorten

C0, C1 = [chr(code) for code in range(0x20)], [chr(code) for code in range(0x80, 0xA0)]
BIDI = [chr(code) for code in (*range(0x202A, 0x202F), *range(0x2066, 0x206A), 0x200E, 0x200F, 0x061C)]
WITHOUT_A_SHAPE = {*C0, *C1, "\x7f", *BIDI, chr(0xD800), chr(0xDFFF), "\u2028", "\u2029", "\u200b", "\ufeff"}
"""What has an effect on a terminal or on the reading of a text, and no shape of its own."""


@pytest.mark.parametrize("character", sorted(WITHOUT_A_SHAPE - {"\t", "\n"}), ids=ascii)
def test_what_has_no_shape_is_an_escape(character: str) -> None:
    for lines in (True, False):
        shown = escaped(f"a{character}b", lines=lines)
        assert shown == f"a{ascii(character)[1:-1]}b"


@pytest.mark.parametrize("text", ["", "plain", "é ß 語 ½ “”", "\U0001f600", "a\tb", "\\x1b"])
def test_text_stays_as_it_is(text: str) -> None:
    assert escaped(text) == text


def test_line_ends_stay_where_a_text_has_lines_and_are_spaces_elsewhere() -> None:
    assert escaped("a\nb\x00\xa0c\u3000d", lines=True) == "a\nb\\x00 c d"
    assert escaped("a\nb\x00") == "a b\\x00"


@given(st.text(st.characters(exclude_categories=())))
def test_of_any_text_only_shapes_tabs_and_line_ends_are_left(text: str) -> None:
    assert not (WITHOUT_A_SHAPE - {"\t", "\n"}) & set(escaped(text, lines=True))
    assert not (WITHOUT_A_SHAPE - {"\t"}) & set(escaped(text))
    assert escaped(escaped(text)) == escaped(text)
    escaped(text).encode()


@given(st.text(st.characters(exclude_categories=())), st.integers(2, 100))
def test_a_word_of_a_message_is_short_and_of_shapes_alone(text: str, length: int) -> None:
    short = shorten(text, length)
    assert len(short) <= length
    assert short.isprintable()
    assert describe(text).isprintable()
