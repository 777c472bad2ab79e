"""The codes of errors that clients of a server or gateway get: what each means, and where the code raises it.

`MEANINGS` is written by hand, statuses are read from the source. `codes` fails if the two name other codes.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

SOURCE = Path(__file__).resolve().parent.parent / "src" / "fovea"
ELSEWHERE = {"bench", "cli", "deploy", "doctor", "evaluation", "planner"}
"""Packages whose errors no client of a server gets."""
START = {"bad_checkpoint", "bad_config", "bad_model", "unsupported_model"}
"""Codes of classes whose errors end a process at its start."""
PLACES = {"Refusal": 1, "invalid": 1, "note": 1, "_fail": 1, "_shortage": -1}
"""Functions that take a code as an argument without a name, and its place."""
STATUS = {"invalid": {400}, "_shortage": {429}}
"""Statuses of the errors that functions make, if they are not classes."""

MEANINGS: Mapping[str, str] = {
    "accounts_unavailable": "the accounts of tenants cannot be read now; the gateway's log says why",
    "backend_error": "a backend's error has no code of its own",
    "backend_stream_broken": "a backend's stream broke off",
    "backends_busy": "all backends of the model are at their limits",
    "bad_backend_answer": "a backend's answer cannot be read",
    "bad_config": "the configuration that should be loaded has a mistake; the old one stays",
    "batch_dir_failed": "the folder of batches cannot be written",
    "batch_not_found": "no such batch",
    "batch_store_full": "files and batches fill `--batch-store-mib`",
    "batches_off": "the server has no `--batch-dir`",
    "bodies_full": "request bodies fill `--max-bodies-mib`",
    "body_timeout": "the body did not arrive in time",
    "body_too_complex": "the body has too many values, levels or fields",
    "budget_exceeded": "the tenant's budget of the day or month is spent",
    "context_length_exceeded": "the prompt cannot fit into the context or the KV pool",
    "count_tokens_unsupported": "a gateway cannot count tokens",
    "deadline_exceeded": "the request's timeout is over",
    "decoder_unavailable": "no process can decode the file now",
    "draining": "the gateway shuts down",
    "duplicate_custom_id": "batch: a `custom_id` occurs twice",
    "empty_file": "batch: the file has no requests",
    "engine_error": "a defect; the log has the details",
    "expired_api_key": "the key has expired",
    "failed": "batch: it failed without a code of its own",
    "file_not_found": "no such file",
    "forbidden": "the settings do not allow this",
    "format_failed": "the answer's form became too complex while it was generated",
    "header_timeout": "the headers did not arrive in time",
    "header_too_long": "a header that is forwarded is too long",
    "headers_too_large": "the headers exceed `--max-header-kib`",
    "host_not_allowed": "without keys: the `Host` is none of `--server-names`",
    "http_version": "another version than HTTP/1.0 and 1.1",
    "idle_process": "profile: no thread worked meanwhile; ask with `idle=true`",
    "image_animated": "the image is an animation",
    "image_fetch_failed": "the image cannot be downloaded or read",
    "image_not_found": "the stored image has expired or never existed",
    "image_not_supported": "the model takes text alone",
    "image_too_large": "the image exceeds a limit on bytes, sides or pixels",
    "image_too_long": "the image's sides differ too much (`--max-aspect-ratio`)",
    "image_too_small": "a side is below `--min-side`",
    "image_truncated": "the image ends early",
    "internal_error": "a defect; the log has the details",
    "invalid_api_key": "the key is unknown or not for this path",
    "invalid_image": "the image cannot be decoded",
    "invalid_image_url": "the image's URL is malformed",
    "invalid_json": "the body is not JSON",
    "invalid_line": "batch: a line is not a request",
    "invalid_media": "the image or video cannot be used",
    "invalid_pdf": "the PDF cannot be read",
    "invalid_request": "the request is wrong",
    "invalid_value": "a field has a wrong type, value or combination",
    "invalid_video": "the video cannot be decoded",
    "invalid_video_url": "the video's URL is malformed",
    "key_gone": "batch: the key that created it is no longer valid",
    "key_limit_exceeded": "the request can never fit the key's limits",
    "keys_file_unusable": "the gateway's keys file cannot be read or written",
    "layout": "the engines have another version, model, precision or block size",
    "lookups_full": "all threads that look up host names are busy",
    "malformed_http": "the request is not valid HTTP/1.1",
    "media_full": "images and videos of requests fill `--max-media-mib` or `--max-fetching-mib`",
    "method_not_allowed": "the route does not accept this method",
    "misplaced_image": "an image is in a field that is not read",
    "missing_api_key": "a key is required",
    "missing_field": "a required field is missing",
    "model_not_found": "no such model, or not for this key",
    "needs_pixels": "a render cannot say it: the pixels of an image or video decide about its tokens",
    "no_admin_key": "the gateway's `/admin` is closed: it has API keys and no admin key",
    "no_backend": "no backend accepts requests",
    "no_cache": "the response cache is off",
    "no_keys_file": "the gateway has no keys file, so its keys cannot be changed by the API",
    "no_such_cache": "no such cache",
    "no_such_page": "the PDF has fewer pages",
    "not_a_pdf": "the file is not a PDF",
    "not_found": "the named thing does not exist",
    "origin_not_allowed": "without keys: the page of another site made the browser ask",
    "out_of_memory": "the request does not fit into the device's memory, even alone",
    "overloaded": "running and waiting requests are at their limits",
    "pages_too_large": "the pages exceed the memory of one call",
    "payload_too_large": "the body exceeds `--max-body-mib`",
    "pdf_encrypted": "the PDF needs a password",
    "pdf_unavailable": "the extra `pdf` is not installed, or no process can render now",
    "profiler_unavailable": "py-spy is missing or may not trace processes",
    "profiling": "another profile is being recorded",
    "queue_full": "the gateway's queue is full",
    "rate_limit_exceeded": "the key is over a limit now",
    "renders_off": "this server renders no prompts (`--max-renders` 0)",
    "response_not_found": "the answer is not kept",
    "shutting_down": "the gateway ended during the answer",
    "too_many_connections": "the address has too many connections",
    "too_many_headers": "more than `--max-headers`",
    "too_many_images": "more than `--max-images`",
    "too_many_lines": "batch: more than 50,000 requests",
    "too_many_pages": "more than `--max-pdf-pages`",
    "too_many_videos": "more than `--max-videos`",
    "total_timeout": "the request took longer than the gateway's `total_s`",
    "unavailable": "the server loads, drains or has no engine",
    "unknown_backend": "no such backend",
    "unknown_field": "a field looks misspelt, or is not accepted",
    "unknown_key": "no key or tenant of this name or fingerprint is in the keys file",
    "unknown_request": "feedback: no such answer of an experiment",
    "unknown_url": "no such route",
    "unsupported_encoding": "the body is compressed",
    "unsupported_field": "a field asks for something that is not supported",
    "unsupported_format": "the form of the answer cannot be followed exactly",
    "unsupported_image_type": "not PNG, JPEG, WebP, GIF or BMP",
    "unsupported_media": "the gateway does not forward this kind of media",
    "unsupported_route": "the route is not offered",
    "unsupported_video_type": "not MP4 or WebM, or an unknown codec",
    "upstream_failed": "all attempts at backends failed",
    "upstream_timeout": "backends did not answer in time",
    "url_not_allowed": "the settings do not allow this URL",
    "url_too_long": "the URL exceeds `--max-url-kib`",
    "video_damaged": "the video is damaged",
    "video_empty": "the video has no frames",
    "video_fetch_failed": "the video cannot be downloaded or read",
    "video_not_supported": "the model takes no videos",
    "video_too_large": "the video exceeds a limit on bytes, pixels or work",
    "video_too_long": "the video exceeds a limit on seconds or frames",
    "video_truncated": "the video ends early",
    "video_unavailable": "the extra `video` is not installed",
}


def codes() -> dict[str, tuple[int, ...]]:
    """Return the statuses of every code; none: it is in the errors of a batch, or has a backend's status.

    Raises ValueError if the code raises one without a meaning, or a meaning has a code that is not raised.
    """
    found = _scan([ast.parse(path.read_text(encoding="utf-8")) for path in _files()])
    missing, extra = sorted(found.keys() - MEANINGS.keys()), sorted(MEANINGS.keys() - found.keys())
    if missing or extra:
        raise ValueError(f"tools/error_codes.py: without a meaning: {missing}; not raised: {extra}")
    return {code: tuple(sorted(found[code])) for code in sorted(found)}


def _files() -> Iterator[Path]:
    for path in sorted(SOURCE.rglob("*.py")):
        if path.relative_to(SOURCE).parts[0] not in ELSEWHERE:
            yield path


class _Class:
    """An error class: its bases, its status and its code, as the source declares them."""

    def __init__(self, node: ast.ClassDef) -> None:
        self.bases = [base.id for base in node.bases if isinstance(base, ast.Name)]
        values = {
            name: line.value.value
            for line in node.body
            for name in _assigned(line)
            if isinstance(line, ast.Assign | ast.AnnAssign) and isinstance(line.value, ast.Constant)
        }
        self.status, self.code = values.get("status"), values.get("default_code")


def _assigned(line: ast.stmt) -> list[str]:
    """Return the name to which a statement assigns, if it is one name."""
    if isinstance(line, ast.Assign):
        return [target.id for target in line.targets if isinstance(target, ast.Name)]
    return [line.target.id] if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name) else []


def _scan(trees: Iterable[ast.Module]) -> dict[str, set[int]]:
    """Return every code in the source with the statuses of the errors that have it."""
    lines = [line for tree in trees for line in tree.body]
    nodes = [node for line in lines for node in ast.walk(line)]
    classes = {node.name: _Class(node) for node in nodes if isinstance(node, ast.ClassDef)}
    names = _constants(lines)
    found: dict[str, set[int]] = defaultdict(set)
    for name, one in classes.items():
        if one.code and _statuses(name, classes) and one.code not in START:
            found[str(one.code)] |= _statuses(name, classes)
    for node in nodes:
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            for code in _codes(name, node, names):
                given = {int(ast.unparse(node.args[0]))} if name == "Refusal" else STATUS.get(name)
                found[code] |= given or _statuses(name, classes)
    return found


def _constants(lines: Iterable[ast.stmt]) -> dict[str, set[str]]:
    """Return the values of constants such as RATE_LIMIT = "rate_limit_exceeded", in any module."""
    names: dict[str, set[str]] = defaultdict(set)
    for line in lines:
        if isinstance(line, ast.Assign):
            for name in _assigned(line):
                names[name] |= _texts(line.value, {})
    return names


def _statuses(name: str, classes: Mapping[str, _Class]) -> set[int]:
    """Return the status of an error class, its own or inherited; empty if it is not an error class."""
    if name not in classes:
        return set()
    own = classes[name].status
    return (
        {int(str(own))} if own else set().union(*(_statuses(base, classes) for base in classes[name].bases))
    )


def _codes(name: str, node: ast.Call, names: Mapping[str, set[str]]) -> set[str]:
    """Return the codes in a call of a function. names: values of constants."""
    values = [keyword.value for keyword in node.keywords if keyword.arg == "code"]
    if name in PLACES and len(node.args) > 1:
        values.append(node.args[PLACES[name]])
    return set().union(*(_texts(value, names) for value in values))


def _texts(value: ast.expr, names: Mapping[str, set[str]]) -> set[str]:
    """Return the codes that an expression can be."""
    if isinstance(value, ast.Name):
        return set(names.get(value.id, ()))
    if isinstance(value, ast.IfExp):
        return _texts(value.body, names) | _texts(value.orelse, names)
    if isinstance(value, ast.BoolOp):
        return set().union(*(_texts(each, names) for each in value.values))
    if isinstance(value, ast.JoinedStr):
        text = "".join(
            str(each.value) if isinstance(each, ast.Constant) else "{noun}" for each in value.values
        )
    else:
        text = str(value.value) if isinstance(value, ast.Constant) and value.value else ""
    nouns = ("file", "batch") if text == "{noun}_not_found" else ("image", "video")
    texts = {text.replace("{noun}", noun) for noun in nouns}
    return {each for each in texts if re.fullmatch(r"[a-z]+(_[a-z0-9]+)+|[a-z]{6,}", each)}
