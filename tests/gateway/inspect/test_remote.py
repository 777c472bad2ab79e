"""URLs without their signatures: equal for one object, different for two."""

from __future__ import annotations

from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fovea.gateway.inspect.images import KnownImages, name_of, unsigned

S3 = "https://bucket.s3.eu-central-1.amazonaws.com/scans/page%201.png"
SIGNED = {
    "S3": (
        S3,
        "X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Credential=AKIA%2F{n}&X-Amz-Date=2026{n}&X-Amz-Expires=900&"
        "X-Amz-SignedHeaders=host&X-Amz-Security-Token=tok{n}&X-Amz-Signature=abc{n}",
    ),
    "S3 version 2": (S3, "AWSAccessKeyId=A{n}&Expires={n}&Signature=s%2B{n}"),
    "GCS": (
        "https://storage.googleapis.com/bucket/a.png",
        "X-Goog-Algorithm=GOOG4&X-Goog-Credential=c{n}&X-Goog-Date={n}&X-Goog-Expires=1&"
        "X-Goog-SignedHeaders=host&X-Goog-Signature={n}",
    ),
    "Azure": (
        "https://account.blob.core.windows.net/c/a.png",
        "sv=2024-11-04&st=2026{n}&se=2026{n}&sr=b&sp=r&sig=x%2F{n}%3D&spr=https",
    ),
    "CloudFront": ("https://d1.cloudfront.net/a.png", "Expires={n}&Signature=s~{n}_&Key-Pair-Id=K{n}"),
    "CloudFront with a policy": (
        "https://d1.cloudfront.net/a.png",
        "Policy=p{n}&Signature={n}&Key-Pair-Id=K",
    ),
    "Alibaba": ("https://b.oss-cn-x.aliyuncs.com/a.png", "OSSAccessKeyId=i&Expires={n}&Signature={n}"),
    "Tencent": ("https://b.cos.x.myqcloud.com/a.png", "q-sign-time={n}&q-signature={n}&q-ak=x"),
    "Akamai": ("https://media.example/a.png", "hdnts=exp={n}~hmac={n}"),
}


@pytest.mark.parametrize("store", SIGNED)
def test_signed_urls_of_one_object_are_equal(store: str) -> None:
    url, query = SIGNED[store]
    names = {name_of(f"{url}?{query.format(n=number)}") for number in range(5)}
    assert names == {name_of(url)}


@pytest.mark.parametrize("store", SIGNED)
@pytest.mark.parametrize("other", ["versionId=2", "generation=7", "w=100", "snapshot=2026", "id=%FF", "a"])
def test_other_fields_make_other_objects(store: str, other: str) -> None:
    url, query = SIGNED[store]
    signed = query.format(n=1)
    plain = name_of(f"{url}?{signed}")
    assert name_of(f"{url}?{other}&{signed}") == name_of(f"{url}?{signed}&{other}") != plain
    assert name_of(f"{url}?{signed}&{other}0") not in (plain, name_of(f"{url}?{signed}&{other}"))


@pytest.mark.parametrize(
    ("one", "two"),
    [
        ("https://a.example/x", "https://b.example/x"),
        ("https://a.example/x", "http://a.example/x"),
        ("https://a.example/x", "https://a.example/X"),
        ("https://a.example/x", "https://a.example/x/"),
        ("https://a.example/x", "https://a.example:8443/x"),
        ("https://a.example/x?y", "https://a.example/x%3Fy"),
        ("https://a.example/x?id=%FF", "https://a.example/x?id=%FE"),
        ("https://a.example/x?id=1&id=2", "https://a.example/x?id=2&id=1"),
        ("https://a.example/x?id=1%262", "https://a.example/x?id=1&2"),
        ("https://a.example/x?a=1&b=2", "https://a.example/x?a=1%26b=2"),
        ("https://a.example/x?signature-of=1", "https://a.example/x"),
        ("https://a.example/x?id=sig", "https://a.example/x"),
    ],
)
def test_different_objects_differ(one: str, two: str) -> None:
    assert name_of(one) != name_of(two)


@pytest.mark.parametrize(
    ("one", "two"),
    [
        ("https://A.example/x", "HTTPS://a.EXAMPLE/x"),
        ("https://a.example/x", "https://a.example/x#part"),
        ("https://a.example/x", "https://a.example/x?"),
        ("https://a.example/x?a=1&b=2", "https://a.example/x?b=2&a=1"),
        ("https://a.example/x", "https://a.example/x?%58-Amz-Signature=1"),
    ],
)
def test_spellings_of_one_object_are_equal(one: str, two: str) -> None:
    assert unsigned(one) == unsigned(two)


HOSTS = st.sampled_from(["a.example", "b.example", "a.example:81"])
PATHS = st.text(max_size=8).map(lambda text: "/" + quote(text))
FIELDS = st.lists(
    st.tuples(st.sampled_from(["id", "v", "sig", "expires", "X-Amz-Date"]), st.text(max_size=4)), max_size=4
)


def url_of(host: str, path: str, fields: list[tuple[str, str]]) -> str:
    return f"https://{host}{path}?{'&'.join(f'{name}={quote(value)}' for name, value in fields)}"


@given(HOSTS, PATHS, FIELDS, HOSTS, PATHS, FIELDS)
def test_names_are_equal_only_for_one_object(
    host: str, path: str, fields: list[tuple[str, str]],
    other_host: str, other_path: str, other_fields: list[tuple[str, str]],
) -> None:  # fmt: skip
    def identifying(given: list[tuple[str, str]], name: str) -> list[str]:
        return [value for each, value in given if each == name]

    one, two = url_of(host, path, fields), url_of(other_host, other_path, other_fields)
    equal = (host, path) == (other_host, other_path) and all(
        identifying(fields, name) == identifying(other_fields, name) for name in ("id", "v")
    )
    assert (name_of(one) == name_of(two)) == equal


@given(st.text(st.characters(), max_size=60))
def test_any_text_is_accepted(text: str) -> None:
    assert len(name_of(text)) == 16
    assert len(name_of(f"https://a.example/{text}?{text}={text}")) == 16


def test_what_is_used_least_is_forgotten() -> None:
    known = KnownImages(2)
    known.learn(b"a", "1")
    known.learn(b"b", "2")
    assert known.find(b"a") == "1"
    known.learn(b"c", "3")
    assert [known.find(name) for name in (b"a", b"b", b"c")] == ["1", None, "3"]
    known.learn(b"a", "4")
    assert known.find(b"a") == "4"
    assert len(known) == 2
