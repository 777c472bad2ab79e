"""Compiles each form in a separate process first, with limits on time and memory; vocabularies for it.

The library has limits of its own, but some regular expressions go beyond them and take minutes. A thread
cannot be stopped, a process can. So a form is compiled in the engine only after it was compiled here.

    engine            helper                         attempt
    check(form) --->  reads a line, forks  --------> compiles, within CPU_S seconds and MEMORY bytes
                <---  sends the result  <----------- the result, or nothing if it was killed

The helper has a vocabulary of single bytes: what a compilation costs hardly depends on the vocabulary.
The vocabulary of the model is loaded here, too (`load_vocabulary`).
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import lru_cache
from typing import IO, TYPE_CHECKING, Any, Protocol

from fovea.core.constraints import AnswerFormat
from fovea.core.errors import InvalidRequest, Unavailable
from fovea.engine.grammar.definition import compile_format, explain_error
from fovea.media.sandbox.jail import limit_resources

if TYPE_CHECKING:
    from llguidance import LLTokenizer


Encode = Callable[[str], list[int]]
MOST_TEXTS, LONGEST_TEXT = 4096, 256
"""Number and length in characters of the texts whose tokens are remembered: forced texts come again."""
CPU_S = 0.2
"""Most processor time of an attempt in seconds. It does not count while other processes run."""
MEMORY = 512 * 1024 * 1024
"""Most memory of an attempt beyond that of the helper, in bytes."""
ANSWER_S = 10.0
"""Longest time until the helper answers. Beyond it, the helper is restarted."""
END = 256


class Trial:
    """The helper process, seen from the engine. For one thread. It is started on first use."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def check(self, form: AnswerFormat) -> None:
        """Compile a form in a process of its own.

        Raises InvalidRequest if it is not supported or costs too much, Unavailable if no process can be
        started.
        """
        line = json.dumps(asdict(form)).encode() + b"\n"
        try:
            try:
                answer = self._ask(line)
            except EOFError:
                answer = self._ask(line)  # the helper had ended, for whatever reason
        except (OSError, EOFError) as error:
            self.close()
            raise Unavailable(f"answer formats cannot be checked: {error}", scope="request") from error
        if answer is None:
            raise InvalidRequest(
                f"{form.kind}: it takes more than {CPU_S:g} seconds or {MEMORY >> 20} MiB to compile",
                code="unsupported_format",
            )
        if "error" in answer:
            raise InvalidRequest(answer["error"], code="unsupported_format")

    def close(self) -> None:
        """Stop the helper. A later check starts another."""
        process, self._process = self._process, None
        if process is not None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # an attempt may be at work, too
            process.communicate()

    def _ask(self, job: bytes) -> dict[str, str] | None:
        """Return the helper's answer; None: the attempt was killed.

        Raises EOFError if the helper ended, or did not answer in time.
        """
        if self._process is None or self._process.poll() is not None:
            self.close()
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "fovea.engine.grammar.trial"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={"PYTHONPATH": os.pathsep.join(sys.path), "RAYON_NUM_THREADS": "1"},
                cwd="/",  # whose modules are imported, so not the folder in which the server was started
                start_new_session=True,  # Ctrl-C in a terminal is for the server
            )
        source, sink = self._process.stdout, self._process.stdin
        assert source is not None
        assert sink is not None
        sink.write(job)
        sink.flush()
        answered = select.poll()  # select.select takes no descriptors from 1024 on
        answered.register(source, select.POLLIN)
        line = source.readline() if answered.poll(1000 * ANSWER_S) else b""
        if not line:
            self.close()
            raise EOFError("the process that tries them does not answer")
        answer: dict[str, str] | None = json.loads(line)
        return answer


class GrammarTokenizer(Protocol):
    """The tokenizer of a model, as far as grammars need it."""

    @property
    def backend(self) -> Any:
        """The tokenizer of the library `tokenizers`; None: there is none."""
        ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def eos_ids(self) -> frozenset[int]: ...

    @property
    def special_ids(self) -> frozenset[int]: ...

    def encode_plain(self, text: str) -> list[int]: ...

    def token_bytes(self, token_id: int) -> bytes: ...


def load_vocabulary(tokenizer: GrammarTokenizer, size: int) -> LLTokenizer:
    """Return the vocabulary. For a large one it takes about a second.

    size: number of the model's logits. Ids that the tokenizer lacks are never allowed. Special tokens of the
        tokenizer after those, such as the image token of Llama 3.2 Vision, are left out.

    Raises InvalidRequest if the library cannot read the tokenizer.
    """
    from llguidance import LLTokenizer, TokenizerWrapper

    ends = sorted(token for token in tokenizer.eos_ids if token < size)
    try:
        encode = tokenizer.encode_plain if tokenizer.backend is None else _plain_encode(tokenizer.backend)
        tokens = [tokenizer.token_bytes(token) for token in range(min(size, tokenizer.vocab_size))]
        specials = sorted(token for token in tokenizer.special_ids | set(ends) if token < size)
        plain = PlainTokens(tokens, ends[0], specials, _exact(encode, tokens, frozenset(specials)))
        return LLTokenizer(TokenizerWrapper(plain), n_vocab=size, eos_token=ends)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of the library's Rust code is not an Exception
        raise InvalidRequest(
            f"this model's tokenizer cannot be used for structured output: {str(error)[:300]}",
            code="unsupported_field",
        ) from error


def _plain_encode(backend: Any) -> Encode:
    """Return a function that encodes a text as it is, with as little as possible of what a tokenizer changes.

    A normalizer composes accents or lowers letters, a pre-tokenizer puts a space before the text, and the
    characters of a control token become that token. All of this is right for a prompt and wrong here.

    Raises ValueError if the bytes of its tokens are unknown.
    """
    import tokenizers

    content = json.loads(backend.to_str())
    decoder = content.get("decoder") or {}
    kinds = {decoder.get("type"), *(part["type"] for part in decoder.get("decoders", ()))}
    if not kinds & {"ByteLevel", "ByteFallback"}:
        raise ValueError("its tokens are neither bytes nor text with single bytes")
    content["normalizer"] = {"type": "Sequence", "normalizers": list(_spaces(content.get("normalizer")))}
    _write_no_space_before(content.get("pre_tokenizer"))
    content["truncation"] = content["padding"] = content["post_processor"] = None
    copy = tokenizers.Tokenizer.from_str(json.dumps(content))
    copy.encode_special_tokens = True  # the characters of one are text

    def encode(text: str) -> list[int]:
        # Unlike `encode`, this lets other threads run meanwhile.
        (encoding,) = copy.encode_batch_fast([text], add_special_tokens=False)
        return list(encoding.ids)

    return encode


def _spaces(normalizer: Any) -> Iterator[Any]:
    """Yield the parts of a normalizer that only write spaces in another way, such as SentencePiece's."""
    if normalizer is None:
        return
    if normalizer["type"] == "Sequence":
        for part in normalizer["normalizers"]:
            yield from _spaces(part)
    elif normalizer["type"] == "Replace" and normalizer["pattern"] == {"String": " "}:
        yield normalizer


def _write_no_space_before(pre_tokenizer: Any) -> None:
    """Change a pre-tokenizer, in place, so that it adds no space before a text."""
    if pre_tokenizer is None:
        return
    for part in pre_tokenizer.get("pretokenizers", [pre_tokenizer]):
        if part["type"] == "ByteLevel":
            part["add_prefix_space"] = False
        elif part["type"] == "Metaspace":
            part["prepend_scheme"] = "never"


def _exact(encode: Encode, tokens: Sequence[bytes], specials: frozenset[int]) -> Encode:
    """Return `encode` for the library, which relies on tokens that have exactly the bytes of the text.

    If the tokenizer changes a text nevertheless, its characters are encoded one by one, and those without a
    token as bytes.
    """
    of_bytes = {token: number for number, token in enumerate(tokens) if number not in specials}

    @lru_cache(MOST_TEXTS)
    def exact(text: str) -> tuple[int, ...]:
        ids = tuple(encode(text))
        if not specials.intersection(ids) and b"".join(tokens[i] for i in ids) == text.encode():
            return ids
        pieces: list[int] = []
        for char in text:
            whole = of_bytes.get(char.encode())
            single = [of_bytes.get(bytes([byte])) for byte in char.encode()] if whole is None else [whole]
            if None in single:
                return ids  # this vocabulary cannot write the text; the answer fails where it has to
            pieces += [i for i in single if i is not None]
        return tuple(pieces)

    return lambda text: list(exact(text) if len(text) <= LONGEST_TEXT else exact.__wrapped__(text))


class PlainTokens:
    """A tokenizer that is written in Python, with the attributes that the library's wrapper asks for.

    tokens: bytes of each id.
    end: id that ends an answer.
    specials: ids that stand for no text; None: `end` alone.
    encode: turns text into ids; None: the ids are the text's bytes.
    """

    bos_token_id = None

    def __init__(
        self,
        tokens: Sequence[bytes],
        end: int,
        specials: Sequence[int] | None = None,
        encode: Encode | None = None,
    ) -> None:
        self.tokens = tokens
        self.eos_token_id = end
        self.special_token_ids = [end] if specials is None else specials
        self._encode = encode

    def __call__(self, text: str | bytes) -> list[int]:
        if self._encode is None:
            return list(text if isinstance(text, bytes) else text.encode())
        return self._encode(text if isinstance(text, str) else text.decode())


def serve(source: IO[bytes], sink: IO[bytes]) -> None:
    """Answer each line of `source` with a line: {} for a form that compiles, its error, or null."""
    vocabulary = byte_vocabulary()
    for line in source:
        form = AnswerFormat(**json.loads(line))
        sink.write((attempt(form, vocabulary) or b"null") + b"\n")
        sink.flush()


def byte_vocabulary() -> Any:
    """A vocabulary of the 256 bytes and an end token."""
    from llguidance import LLTokenizer, TokenizerWrapper

    tokens = [*(bytes([byte]) for byte in range(END)), b"<end>"]
    return LLTokenizer(TokenizerWrapper(PlainTokens(tokens, END)), eos_token=END)


def attempt(form: AnswerFormat, vocabulary: Any) -> bytes:
    """Compile in a fork of this process. Returns the line of the result, empty if it was killed."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        _limit()
        result: dict[str, str] = {}
        try:
            matcher = compile_format(form, vocabulary)
            matcher.compute_bitmask()
            if matcher.is_error():
                result = {"error": f"{form.kind}: {explain_error(matcher.get_error(), form.kind)}"}
        except InvalidRequest as error:
            result = {"error": error.message}
        except MemoryError:
            os._exit(1)
        except BaseException as error:  # noqa: BLE001 - a panic of the library is not an Exception
            result = {"error": f"{form.kind}: it cannot be read: {str(error)[:200]}"}
        os.write(writer, json.dumps(result).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        line = pipe.read()
    os.waitpid(child, 0)
    return line


def _limit() -> None:
    """Let the system end this process when it has used too much time, and refuse it too much memory."""
    signal.setitimer(signal.ITIMER_PROF, CPU_S)  # SIGPROF ends a process
    signal.alarm(int(ANSWER_S) // 2)  # if it only waits
    with suppress(OSError):  # on macOS
        limit_resources(MEMORY)


if __name__ == "__main__":
    serve(sys.stdin.buffer, sys.stdout.buffer)
