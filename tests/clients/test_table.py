"""The page about clients, made from results."""

from __future__ import annotations

from tests.clients.table import LONGEST_REASON, Result, one_line, page


def test_page_counts_what_works_and_names_what_does_not() -> None:
    text = page(
        [
            Result("openai", "2.0", "chats", True),
            Result("openai", "2.0", "writes a|b", False, "404 | no route"),
            Result("litellm", "1.0", "embeds", None, "Skipped: no route"),
        ],
        [
            Result("openai", "2.0", "chats", True),
            Result("openai", "2.0", "writes a|b", True),
            Result("litellm", "1.0", "embeds", False, "not routed"),
        ],
    )
    assert "2 clients, 3 tests: 1 work, 2 through the gateway." in text
    assert [line for line in text.splitlines() if line.startswith(("## ", "- ")) or " of " in line[:6]] == [
        "## openai 2.0",
        "1 of 2 work, 2 through the gateway.",
        "- writes a|b: no: 404 | no route",
        "## litellm 1.0",
        "0 of 1 work, 0 through the gateway.",
        "- embeds: not tested: Skipped: no route",
        "- embeds (gateway): no: not routed",
    ]


def test_inputs_of_one_test_share_a_line() -> None:
    results = [Result("openai", "2.0", "reads", works, "" if works else "blurred") for works in (True, False)]
    text = page(results, results[:1])
    assert "0 of 1 work, 1 through the gateway." in text
    assert "- reads: 1 of 2: blurred\n" in text


def test_reason_is_one_line_without_ports() -> None:
    assert one_line("404\n  at http://127.0.0.1:4711/v1") == "404 at http://.../v1"
    assert len(one_line("x " * 200)) <= LONGEST_REASON
