"""Text in and out: the tokenizer of a checkpoint folder, its chat template, and text that grows token by token."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders

# The letter by which GPT-2's scheme names each byte: its own where it can be seen, one beyond Latin-1 else.
_SEEN = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_UNSEEN = [byte for byte in range(256) if byte not in _SEEN]
_BYTE_OF = {chr(byte): byte for byte in _SEEN} | {chr(256 + place): byte for place, byte in enumerate(_UNSEEN)}
_BYTE = re.compile("<0x[0-9A-Fa-f]{2}>")  # how a vocabulary names a byte it has no character for


class TextError(ValueError):
    """A tokenizer or chat template that is missing or cannot be used."""


class Tokenizer:
    """``tokenizer.json`` of a Hugging Face folder, with the chat template beside it when there is one."""

    def __init__(self, fast: FastTokenizer, chat_template: str | None = None, special: dict[str, str] | None = None) -> None:
        self._fast, self._chat_template, self._special = fast, chat_template, special or {}
        self._no_text = {number for number, token in fast.get_added_tokens_decoder().items() if token.special}
        self.bytes_of = _TokenBytes(self)
        self._alone: dict[int, str] = {}

    @classmethod
    def open(cls, folder: str | Path) -> Tokenizer:
        """Read a folder. Raises TextError when tokenizer.json is missing or damaged."""
        folder = Path(folder)
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise TextError(f"{file}: missing; without it prompts must be given as token ids")
        try:
            fast = FastTokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare Exception
            raise TextError(f"{file}: cannot be read: {error}") from error
        config = _json(folder / "tokenizer_config.json")
        template = config.get("chat_template")
        if isinstance(template, list):  # several named ones
            template = next((item.get("template") for item in template if item.get("name") == "default"), None)
        own = folder / "chat_template.jinja"
        if own.is_file():
            template = own.read_text()
        return cls(
            fast, template, {key: _content(config[key]) for key in ("bos_token", "eos_token", "pad_token", "unk_token") if config.get(key)}
        )

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Token ids; ``special`` adds what the tokenizer puts around a text, such as a begin-of-sequence token."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise TextError(f"the text is not valid Unicode: {error.reason} at position {error.start}") from error
        return self._fast.encode(text, add_special_tokens=special).ids

    def decode(self, tokens: Sequence[int]) -> str:
        return self._fast.decode(list(tokens), skip_special_tokens=True)

    def name(self, token: int) -> str | None:
        """How the vocabulary writes a token; None for one that is no text."""
        return None if token in self._no_text else self._fast.id_to_token(token)

    @property
    def is_of_bytes(self) -> bool:
        """Whether every token stands for bytes of its own, so that text is these in a row (GPT-2's scheme, and most since)."""
        return type(self._fast.decoder) is decoders.ByteLevel

    def alone(self, token: int) -> str:
        """``decode`` of one token, remembered."""
        found = self._alone.get(token)
        if found is None:
            found = self._alone[token] = self.decode([token])
        return found

    def may_change(self, token: int, open_before: bool) -> bool:
        """Whether text that ends in this token may still change with the next one: bytes in a row are decoded together.

        open_before: what was answered for the token before; tokens that are no text leave it as it is.
        """
        name = self.name(token)
        return open_before if name is None else _BYTE.fullmatch(name) is not None

    def chat(self, messages: str | Sequence[dict[str, str]]) -> list[int]:
        """Token ids of a conversation, ready for the answer. A string is one message of the user."""
        if self._chat_template is None:
            raise TextError("the checkpoint has no chat template (tokenizer_config.json or chat_template.jinja); use plain prompts")
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        text = _render(self._chat_template, messages=list(messages), add_generation_prompt=True, **self._special)
        return self.encode(text, special=False)  # the template writes its own


class _TokenBytes(dict[int, bytes]):
    """Token -> what it stands for, where ``is_of_bytes``; found when it is first asked for."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def __missing__(self, token: int) -> bytes:
        name = self._tokenizer.name(token) or ""
        letters = [_BYTE_OF.get(letter, -1) for letter in name]
        # A name with other letters is no row of bytes: an added token, which is its own text.
        found = self[token] = bytes(letters) if -1 not in letters else name.encode()
        return found


class TextStream:
    """Text of one answer while its tokens arrive; what has been given out never changes.

    Held back: bytes of an unfinished character, and what may be the beginning of a stop string. The pieces together are
    ``tokenizer.decode`` of all tokens, up to the first stop string.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self._stop = tuple(stop)
        self._text: _ByteText | _AnyText = _ByteText(tokenizer) if tokenizer.is_of_bytes else _AnyText(tokenizer)
        self._certain = self._text.push
        self._held = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """The text that became certain with this token."""
        text = self._certain(token)
        return self._give(text, final=False) if self._stop else text

    def finish(self, tokens: Sequence[int] = ()) -> str:
        """The rest, when no more tokens come than these."""
        return self._give(self._text.finish(tokens), final=True)

    def _give(self, text: str, final: bool) -> str:
        if self.stopped:
            return ""
        self._held += text
        found = min((index for stop in self._stop if (index := self._held.find(stop)) >= 0), default=-1)
        if found >= 0:
            self.stopped = True
            given, self._held = self._held[:found], ""
            return given
        keep = 0 if final else self._open_end()
        given, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return given

    def _open_end(self) -> int:
        """Length of the longest end of the held text that a stop string begins with."""
        return max((n for stop in self._stop for n in range(1, len(stop)) if self._held.endswith(stop[:n])), default=0)


class _ByteText:
    """Text of tokens that are bytes: nothing is decoded twice."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._bytes_of, self._pending = tokenizer.bytes_of, b""

    def push(self, token: int) -> str:
        new = self._bytes_of[token]
        if not self._pending and new.isascii():
            return new.decode()
        self._pending += new
        text = self._pending.decode(errors="replace")
        if text.endswith("\ufffd"):  # of a character that may go on
            return ""
        self._pending = b""
        return text

    def finish(self, tokens: Sequence[int]) -> str:
        text = b"".join([self._pending, *map(self._bytes_of.__getitem__, tokens)]).decode(errors="replace")
        self._pending = b""
        return text


class _AnyText:
    """Text of any tokens: each is decoded behind those before it, which may change how it reads."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []  # from the last piece on, whose tokens give the next ones their context
        self._read, self._before = 0, ""  # how many tokens that piece has, and their text
        self._open = False

    def push(self, token: int) -> str:
        self._tokens.append(token)
        self._open = self._tokenizer.may_change(token, self._open)
        return "" if self._open else self._new(final=False)

    def finish(self, tokens: Sequence[int]) -> str:
        self._tokens += tokens
        return self._new(final=True)

    def _new(self, final: bool) -> str:
        before, after = self._before, self._tokenizer.decode(self._tokens)
        if len(after) <= len(before) or (after.endswith("\ufffd") and not final):
            return ""
        self._tokens = rest = self._tokens[self._read :]
        self._read = len(rest)
        self._before = self._tokenizer.alone(rest[0]) if len(rest) == 1 else self._tokenizer.decode(rest)
        return after[len(before) :]


def _json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_text())
    except ValueError as error:
        raise TextError(f"{file}: not valid JSON: {error}") from error
    return value if isinstance(value, dict) else {}


def _content(token: Any) -> str:
    return token["content"] if isinstance(token, dict) else str(token)


def _render(template: str, **values: Any) -> str:
    try:
        from jinja2 import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError as error:  # torch brings it along, yet does not have to
        raise TextError("chat templates need jinja2: pip install jinja2") from error

    def refuse(message: str) -> str:
        raise TemplateError(message)

    # Sandboxed: a template comes with the checkpoint, from whoever wrote it.
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
    try:
        return environment.from_string(template).render(**values)
    except TemplateError as error:
        raise TextError(f"the chat template failed: {error}") from error
