"""The size of a list's page is bounded, including its items' names."""

from __future__ import annotations

from serve_app.http.paging import MOST_NAMED, first_page


def test_items_that_name_much_make_smaller_pages_which_together_are_all():
    items = [{"id": i, "points": dict.fromkeys(range(9000), {})} for i in range(5)]
    seen, more = [], True
    while more:
        page, more = first_page(items[len(seen) : len(seen) + 4], 3)
        assert sum(len(item["points"]) for item in page) <= MOST_NAMED
        seen += page
    assert seen == items


def test_an_item_that_names_more_than_a_page_holds_is_a_page():
    large = {"id": 0, "tensors": dict.fromkeys(range(MOST_NAMED + 1), {})}
    assert first_page([large, large], 1) == ([large], True)
    assert first_page([large], 1) == ([large], False)
    assert first_page([], 10) == ([], False)
