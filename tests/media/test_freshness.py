"""Terms on which a cache may reuse a response, read from its headers."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from fovea.media.fetch.response import Terms, read_terms

NOW = 1_000_000_000.0
DATE = "Sun, 09 Sep 2001 01:46:40 GMT"
LATER = "Sun, 09 Sep 2001 01:47:40 GMT"
URL = "https://a.example/1"


def terms(**headers: str) -> Terms:
    return read_terms(URL, {name.replace("_", "-"): value for name, value in headers.items()}, NOW)


@pytest.mark.parametrize(
    ("headers", "fresh_s"),
    [
        ({}, 0),
        ({"cache_control": "max-age=60"}, 60),
        ({"cache_control": "Public , MAX-AGE = 60"}, 60),
        ({"cache_control": 'max-age="60"'}, 60),
        ({"cache_control": "max-age=60", "age": "20"}, 40),
        ({"cache_control": "max-age=60", "age": "90"}, 0),
        ({"cache_control": "max-age=60", "age": "soon"}, 60),
        ({"cache_control": "max-age=60, s-maxage=5"}, 5),
        ({"cache_control": "max-age=60, max-age=5"}, 5),
        ({"cache_control": "max-age=60, max-age=x"}, 0),
        ({"cache_control": "max-age=60, no-cache"}, 0),
        ({"cache_control": 'no-cache="set-cookie, x", max-age=60'}, 0),
        ({"cache_control": "max-age=-1"}, 0),
        ({"cache_control": "max-age=1.5"}, 0),
        ({"cache_control": "max-age="}, 0),
        ({"cache_control": "max-age"}, 0),
        ({"cache_control": "max-age=" + "9" * 400}, 1 << 31),
        ({"cache_control": "max-age=60", "expires": DATE, "date": DATE}, 60),
        ({"expires": LATER, "date": DATE}, 60),
        ({"expires": LATER}, 60),
        ({"expires": LATER, "date": DATE, "age": "50"}, 10),
        ({"expires": DATE, "date": LATER}, 0),
        ({"expires": "0"}, 0),
        ({"expires": "Sun, 99 Sep 2001 01:46:40 GMT"}, 0),
        ({"last_modified": DATE}, 0),
    ],
)
def test_seconds_of_freshness(headers: dict[str, str], fresh_s: float) -> None:
    assert terms(**headers).fresh_s == fresh_s


@pytest.mark.parametrize(
    ("headers", "storable"),
    [
        ({}, False),
        ({"cache_control": "max-age=60"}, True),
        ({"etag": '"1"'}, True),
        ({"last_modified": DATE}, True),
        ({"etag": '"1"', "cache_control": "no-cache"}, True),
        ({"etag": '"1"', "cache_control": "no-store"}, False),
        ({"etag": '"1"', "cache_control": "max-age=60, No-Store"}, False),
        ({"etag": '"1"', "cache_control": "max-age=60 no-store"}, False),
        ({"etag": '"1"', "cache_control": "max-age=60; no-store"}, False),
        ({"etag": '"1"', "cache_control": 'a="b, no-store'}, False),
        ({"etag": '"1"', "cache_control": "private, max-age=60"}, False),
        ({"etag": '"1"', "cache_control": 'private="x", max-age=60'}, False),
        ({"etag": '"1"', "cache_control": "x" * 3000}, False),
        ({"cache_control": "max-age=60", "vary": "Accept"}, True),
        ({"cache_control": "max-age=60", "vary": "Accept, *"}, False),
        ({"etag": "ä"}, False),
        ({"etag": "a\x01"}, False),
    ],
)
def test_whether_a_response_may_be_stored(headers: dict[str, str], storable: bool) -> None:
    assert terms(**headers).storable is storable


def test_headers_of_a_revalidation() -> None:
    assert terms(etag='W/"1"', last_modified=DATE).validators == {
        "If-None-Match": 'W/"1"',
        "If-Modified-Since": DATE,
    }
    assert terms(etag="\xff", last_modified=DATE).validators == {"If-Modified-Since": DATE}
    assert terms(cache_control="max-age=60").validators == {}


def test_headers_of_a_confirmation_replace_the_old_ones() -> None:
    old = terms(cache_control="max-age=60", age="50", etag='"1"')
    renewed = old.renew({}, NOW)
    assert (renewed.fresh_s, renewed.validators) == (60, old.validators)
    assert old.renew({"cache-control": "max-age=5", "etag": '"2"'}, NOW).fresh_s == 5
    assert old.renew({"etag": '"2"'}, NOW).validators == {"If-None-Match": '"2"'}
    assert not old.renew({"cache-control": "no-store"}, NOW).storable
    expiring = terms(expires=LATER, date=DATE)
    assert expiring.renew({"date": LATER}, NOW).fresh_s == 0


def test_a_redirect_limits_the_freshness() -> None:
    assert terms(cache_control="max-age=60").limit(5).fresh_s == 5
    assert not terms(cache_control="max-age=60").limit(0).storable
    assert terms(cache_control="max-age=60", etag='"1"').limit(0).storable


@given(st.text(max_size=80), st.text(max_size=40), st.text(max_size=40), st.text(max_size=40))
def test_arbitrary_headers_give_valid_terms(control: str, age: str, date: str, expires: str) -> None:
    result = terms(cache_control=control, age=age, date=date, expires=expires, etag=age, vary=date)
    assert result.fresh_s >= 0
    assert result.size >= len(URL)
    if "no-store" in control.lower().split(","):
        assert not result.storable
