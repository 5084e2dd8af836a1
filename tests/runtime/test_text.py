"""Tokenizer, chat template and growing text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers

from runtime.text import TextError, TextStream, Tokenizer


def byte_tokenizer() -> FastTokenizer:
    """One token per byte, so that every character beyond ASCII spans several tokens; 256 is a special token."""
    vocab = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    fast = FastTokenizer(models.BPE(vocab=vocab, merges=[]))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens(["<|end|>"])
    return fast


TOKENIZER = Tokenizer(byte_tokenizer())


def byte_fallback_tokenizer() -> FastTokenizer:
    """As Llama 2 has it: words, and bytes by name, which are decoded together where they stand in a row; 10 is a special token."""
    names = ["<unk>", "▁a", "▁", "b", "▁▁", "<0xE2>", "<0x82>", "<0xAC>", "<0x20>", "c"]
    fast = FastTokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[], unk_token="<unk>", byte_fallback=True))
    fast.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    fast.add_special_tokens(["</s>"])
    return fast


FALLBACK = Tokenizer(byte_fallback_tokenizer())


def pieces(tokens: list[int], stop: tuple[str, ...] = (), tokenizer: Tokenizer = TOKENIZER) -> list[str]:
    stream = TextStream(tokenizer, stop)
    parts = []
    for token in tokens:
        parts.append(stream.push(token))
        if stream.stopped:
            return parts
    return [*parts, stream.finish()]


def test_a_character_is_given_out_whole() -> None:
    tokens = TOKENIZER.encode("aé😀b")
    assert len(tokens) == 8
    assert pieces(tokens) == ["a", "", "é", "", "", "", "😀", "b", ""]


def test_an_unfinished_character_comes_at_the_end() -> None:
    assert pieces(TOKENIZER.encode("a😀")[:-1]) == ["a", "", "", "", "\ufffd"]


def test_special_tokens_are_not_text() -> None:
    assert pieces([*TOKENIZER.encode("ab"), 256, *TOKENIZER.encode("c")]) == ["a", "b", "", "c", ""]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 256), max_size=30))
def test_pieces_together_are_the_decoded_whole(tokens: list[int]) -> None:
    assert "".join(pieces(tokens)) == TOKENIZER.decode(tokens)


def with_added_tokens() -> Tokenizer:
    fast = byte_tokenizer()
    fast.add_tokens(["<user>", "a word é", "\N{MINUS SIGN}"])  # 257 to 259; the last two are no names of bytes
    return Tokenizer(fast)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.one_of(st.integers(0, 300), st.sampled_from([30, 128, 160, 225, 256, 257, 258, 259])), max_size=30), st.integers(0, 30))
@example([125, 258, 96], 1)
def test_pieces_and_the_rest_at_once_are_what_the_library_decodes(tokens: list[int], pushed: int) -> None:
    tokenizer = with_added_tokens()
    assert tokenizer.is_of_bytes
    stream = TextStream(tokenizer)
    text = "".join(map(stream.push, tokens[:pushed])) + stream.finish(tokens[pushed:])
    assert text == tokenizer.decode(tokens)


@settings(max_examples=500, deadline=None)
@given(st.lists(st.integers(0, 11), max_size=12))
@example([6, 0, 4, 8, 7, 6, 4])
@example([9, 5, 10, 6, 10, 7, 9])
@example([9, 8, 6, 9])  # a valid byte that the next one makes invalid
def test_pieces_of_byte_fallback_together_are_the_decoded_whole(tokens: list[int]) -> None:
    assert "".join(pieces(tokens, tokenizer=FALLBACK)) == FALLBACK.decode(tokens)


def test_bytes_in_a_row_come_when_the_row_ends() -> None:
    assert pieces([9, 5, 6, 7, 9, 8], tokenizer=FALLBACK) == ["c", "", "", "", "€c", "", " "]


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet="abé", max_size=20), st.lists(st.text(alphabet="abé", min_size=1, max_size=3), max_size=3))
def test_stop_strings_cut_where_they_first_end(text: str, stop: list[str]) -> None:
    parts = pieces(TOKENIZER.encode(text), tuple(stop))
    # The oracle looks at every prefix of whole characters, as the tokens arrive.
    expected = text
    for end in range(1, len(text) + 1):
        found = [text[:end].find(word) for word in stop if word in text[:end]]
        if found:
            expected = text[: min(found)]
            break
    assert "".join(parts) == expected


def test_a_beginning_of_a_stop_string_is_held_back_and_then_given() -> None:
    assert pieces(TOKENIZER.encode("abx"), ("abc",)) == ["", "", "abx", ""]
    assert pieces(TOKENIZER.encode("ab"), ("abc",)) == ["", "", "ab"]


def write(folder: Path, **config: object) -> Path:
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


TEMPLATE = (
    "{% for message in messages %}[{{ message['role'] }}]{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def test_chat_template_from_the_tokenizer_config(tmp_path: Path) -> None:
    tokenizer = Tokenizer.open(write(tmp_path, chat_template=TEMPLATE))
    assert tokenizer.decode(tokenizer.chat("hi")) == "[user]hi[assistant]"
    assert (
        tokenizer.decode(tokenizer.chat([{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]))
        == "[system]s[user]u[assistant]"
    )


def test_chat_template_in_its_own_file_wins(tmp_path: Path) -> None:
    write(tmp_path, chat_template="wrong", eos_token={"content": "<|end|>"})
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0]['content'] }}{{ eos_token }}")
    assert Tokenizer.open(tmp_path).chat("x") == [*TOKENIZER.encode("x"), 256]


def test_without_a_template_chat_says_so(tmp_path: Path) -> None:
    tokenizer = Tokenizer.open(write(tmp_path))
    with pytest.raises(TextError, match="no chat template"):
        tokenizer.chat("hi")


def test_a_template_that_refuses_is_an_error_of_the_request(tmp_path: Path) -> None:
    tokenizer = Tokenizer.open(write(tmp_path, chat_template="{{ raise_exception('roles must alternate') }}"))
    with pytest.raises(TextError, match="roles must alternate"):
        tokenizer.chat("hi")


def test_a_template_cannot_reach_the_interpreter(tmp_path: Path) -> None:
    tokenizer = Tokenizer.open(write(tmp_path, chat_template="{{ ''.__class__.__mro__[1].__subclasses__() }}"))
    with pytest.raises(TextError, match="the chat template failed"):
        tokenizer.chat("hi")


def test_missing_and_damaged_tokenizer_files(tmp_path: Path) -> None:
    with pytest.raises(TextError, match=r"tokenizer.json: missing"):
        Tokenizer.open(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(TextError, match=r"tokenizer.json: cannot be read"):
        Tokenizer.open(tmp_path)
