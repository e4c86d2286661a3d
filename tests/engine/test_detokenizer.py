from __future__ import annotations

import pytest
from helpers.engine_fakes import EOS, ByteDecoder, ByteTokenizer
from hypothesis import given
from hypothesis import strategies as st

from sglang_jax.engine.detokenizer import OutputText, SpecialNames


class PieceDecoder:
    """Token i stands for pieces[i]."""

    def __init__(self, pieces: list[str]) -> None:
        self._pieces = pieces

    def push(self, token_id: int) -> str:
        return self._pieces[token_id]

    def flush(self) -> str:
        return ""


def run_pieces(pieces: list[str], stop: list[str], include_stop: bool = False) -> tuple[list[str], str | None, int]:
    """The text shown by each push (and the flush), the match, and the number of tokens it took."""
    text = OutputText(PieceDecoder(pieces), stop, frozenset(), include_stop=include_stop)
    shown = []
    for count, token in enumerate(range(len(pieces)), start=1):
        shown.append(text.push(token))
        if text.matched is not None:
            return shown, text.matched, count
    shown.append(text.flush())
    return shown, text.matched, len(pieces)


def first_match(text: str, stop: list[str]) -> tuple[int, str] | None:
    """The match that ends first (the longest of those), by brute force: its end and the stop string."""
    for end in range(1, len(text) + 1):
        ending = [s for s in stop if text[:end].endswith(s)]
        if ending:
            return end, max(ending, key=len)
    return None


def test_a_character_split_over_tokens_is_held_back() -> None:
    text = OutputText(ByteDecoder(), (), frozenset())
    assert [text.push(byte) for byte in "a€😀".encode()] == ["a", "", "", "€", "", "", "", "😀"]
    assert text.flush() == ""


def test_an_incomplete_character_becomes_a_replacement_only_at_the_end() -> None:
    text = OutputText(ByteDecoder(), (), frozenset())
    assert [text.push(byte) for byte in "€".encode()[:2]] == ["", ""]
    assert text.flush() == "\N{REPLACEMENT CHARACTER}"


def test_a_stop_string_may_span_tokens_and_partial_matches_are_shown() -> None:
    shown, matched, count = run_pieces(["a", "<", "b", "<", "/", "s>x", "never"], ["</s>"])
    assert shown == ["a", "", "<b", "", "", ""]
    assert matched == "</s>"
    assert count == 6


def test_overlapping_partial_match() -> None:
    assert run_pieces(["aa", "a", "b"], ["aab"])[:2] == (["", "a", ""], "aab")


def test_include_stop_keeps_the_match_and_drops_what_follows() -> None:
    shown, matched, _ = run_pieces(["x", "END of", "y"], ["END"], include_stop=True)
    assert "".join(shown) == "xEND"
    assert matched == "END"


def test_stop_of_many_bytes() -> None:
    text = OutputText(ByteDecoder(), ["ö😀"], frozenset())
    shown = [text.push(byte) for byte in "aö😀b".encode()[:7]]
    assert "".join(shown) == "a"
    assert text.matched == "ö😀"


def test_of_several_stop_strings_the_first_to_end_wins_and_then_the_longest() -> None:
    assert run_pieces(["abc"], ["abc", "b"])[:2] == (["a"], "b")
    assert run_pieces(["xab"], ["b", "ab"])[:2] == (["x"], "ab")


def test_held_back_text_is_shown_at_the_end() -> None:
    assert run_pieces(["abc<", "/"], ["</s>"]) == (["abc", "", "</"], None, 2)


@pytest.mark.parametrize(("include_stop", "expected"), [(False, "ab"), (True, "abc")])
def test_stop_token_with_text(include_stop: bool, expected: str) -> None:
    text = OutputText(ByteDecoder(), (), frozenset({ord("c"), EOS}), include_stop=include_stop)
    assert "".join(text.push(byte) for byte in b"abc") + text.flush() == expected


def test_special_tokens_show_only_if_wanted_and_never_the_one_that_stopped() -> None:
    text = OutputText(ByteDecoder(skip_special_tokens=False), (), frozenset({EOS}))
    assert [text.push(token) for token in (97, 257, EOS)] == ["a", "<257>", ""]


@given(st.lists(st.text("ab", max_size=5), max_size=12), st.lists(st.text("ab", min_size=1, max_size=4), max_size=4))
def test_matches_equal_brute_force_for_any_tokenization(pieces: list[str], stop: list[str]) -> None:
    text = "".join(pieces)
    expected = first_match(text, stop)
    for include_stop in (False, True):
        shown, matched, count = run_pieces(pieces, stop, include_stop)
        if expected is None:
            assert ("".join(shown), matched) == (text, None)
            continue
        end, string = expected
        assert matched == string
        assert "".join(shown) == text[: end if include_stop else end - len(string)]
        lengths = [len("".join(pieces[: i + 1])) for i in range(len(pieces))]
        assert count == 1 + next(i for i, length in enumerate(lengths) if length >= end)


@given(st.text("ab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=4))
def test_only_text_that_may_become_a_stop_string_is_held_back(text: str, stop: list[str]) -> None:
    shown, matched, count = run_pieces(list(text), stop)
    for position in range(1, count + 1 if matched is None else count):
        tails = [text[k:position] for k in range(position + 1)]
        held = max(len(tail) for tail in tails if any(one.startswith(tail) for one in stop))
        assert "".join(shown[:position]) == text[: position - held]


def test_special_characters_of_patterns_are_literal() -> None:
    stop = ["^a", "]b", "-c", "\\d", "[e", ".", "a-z"]
    for string in stop:
        shown, matched, _ = run_pieces(["x5b ", *string, "tail"], stop)
        assert ("".join(shown), matched) == ("x5b ", string)


def test_an_endless_near_match_of_a_stop_string_is_fast() -> None:
    """Each token finds as much text held back as possible, and releases one character."""
    text = OutputText(PieceDecoder(["a"]), ["a" * 3000 + "b"], frozenset())
    shown = [text.push(0) for _ in range(20_000)]
    assert shown == [""] * 3000 + ["a"] * 17_000
    assert text.matched is None


@given(
    pieces=st.lists(st.text(alphabet="ab<", max_size=3), max_size=12),
    stop=st.lists(st.text(alphabet="ab<", min_size=1, max_size=3), min_size=1, max_size=2, unique=True),
    least=st.integers(0, 13),
)
def test_stop_strings_within_min_new_tokens_do_not_end_the_output(
    pieces: list[str], stop: list[str], least: int
) -> None:
    text = OutputText(PieceDecoder(pieces), stop, frozenset(), unsearched=least)
    shown = ""
    for token in range(len(pieces)):
        shown += text.push(token)
        if text.matched is not None:
            break
    else:
        shown += text.flush()
    first, rest = "".join(pieces[:least]), "".join(pieces[least:])
    found = first_match(rest, stop)
    assert text.matched == (None if found is None else found[1])
    assert shown == first + (rest if found is None else rest[: found[0] - len(found[1])])


@pytest.mark.parametrize("skip", [True, False], ids=["skipped", "shown"])
@pytest.mark.parametrize(
    ("tokens", "stop", "text", "matched"),
    [
        ([97, 257, 98], ["<257>"], "a", "<257>"),
        ([97, EOS], ["<256>"], "a", "<256>"),
        ([97, *b"<257>", 98], ["<257>"], "a", "<257>"),
        ([97, 10, 257, 98], ["\n<257>"], "a", "\n<257>"),
        ([97, 257, 10, 98], ["<257>\n"], "a", "<257>\n"),
        ([97, 257, 258, 98], ["<258>", "<257><258>"], "a", "<257><258>"),
        ([97, 257, 98, 258], ["<257>a", "<258>"], "a{257}b", "<258>"),
        ([97, 10, 258, 257, 98], ["\n<257>", "<258>!"], "a\n{258}{257}b", None),
        ([97, 10, 257], ["\n<257>\n"], "a\n{257}", None),
        ([0xE2, 257, 98], ["<257>"], "", "<257>"),
    ],
)
def test_stop_strings_may_name_special_tokens(
    tokens: list[int], stop: list[str], text: str, matched: str | None, skip: bool
) -> None:
    """Regression: they were left out of the text before a stop string was searched in it."""
    hidden = SpecialNames(ByteTokenizer.special_tokens).hidden_in(stop)
    text = "".join(
        part if number % 2 == 0 else "" if skip else f"<{part}>"
        for number, part in enumerate(text.replace("{", "}").split("}"))
    )
    for include in (False, True):
        output = OutputText(
            ByteDecoder(skip), stop, {EOS}, include_stop=include, **({"hidden": hidden} if skip else {})
        )
        shown = ""
        for token in tokens:
            shown += output.push(token)
            if output.matched is not None:
                break
        else:
            shown += output.flush()
        if token == EOS and not skip and not include:
            continue  # an end-of-sequence token is not part of the text
        assert (shown, output.matched) == (text + (matched or "" if include else ""), matched)


def test_a_marker_that_a_stop_string_names_ends_the_text_and_others_are_shown() -> None:
    hidden = SpecialNames(ByteTokenizer.special_tokens).hidden_in(["<257>", "<258>!"])
    output = OutputText(
        ByteDecoder(markers={257, 258, 259}), ["<257>", "<258>!"], {EOS}, markers={257, 258, 259}, hidden=hidden
    )
    assert [output.push(token) for token in (97, 259, 258, 98, 258, 259, 257)] == [
        "a", "<259>", "", "<258>b", "", "<258><259>", "",
    ]  # fmt: skip
    assert output.matched == "<257>"


def test_the_first_tokens_are_not_searched_for_special_tokens() -> None:
    hidden = SpecialNames(ByteTokenizer.special_tokens).hidden_in(["<257>"])
    output = OutputText(ByteDecoder(), ["<257>"], {EOS}, unsearched=2, hidden=hidden)
    assert [output.push(token) for token in (257, 97, 98, 257)] == ["", "a", "b", ""]
    assert output.matched == "<257>"


def test_names_of_special_tokens_are_found_whole() -> None:
    hidden = SpecialNames({"<a>": 1, "<a>b": 2, "": 3, "<c>": 4}).hidden_in(["<a>b<a>", "x", "<c"])
    assert sorted(hidden.signs) == [1, 2]
    assert list(hidden.strings.values()) == ["<a>b<a>"]
