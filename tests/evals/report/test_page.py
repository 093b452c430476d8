"""The report opens without a network, shows the summary's numbers, and a row opens its trajectory."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from made import HOSTILE, make_results
from playwright.sync_api import Page, expect

from evals.config import EvalError
from evals.report import page as pages
from evals.report.__main__ import main
from evals.report.page import write_report
from tests.browsers import chromium, show

VARIANTS = ("control", "calm", "anxiety")


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    with chromium() as browser:
        yield browser.new_page()


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sixty samples whose texts are hostile."""
    directory = make_results(tmp_path_factory.mktemp("made") / "run", 10, variants=VARIANTS, text=HOSTILE, skill=0.5)
    write_report(directory)
    return directory


def samples(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted((directory / "samples").iterdir())]


def test_the_page_loads_nothing_and_may_load_nothing(results: Path) -> None:
    text = (results / "report.html").read_text()
    named = re.findall(r"""(?:src|href)\s*=\s*["']?(.)""", text.partition("<script")[0])
    assert set(named) == {"#"}
    assert "default-src 'none'" in text
    assert text.count("<script>") == 1
    assert "onerror" not in text


def test_the_page_shows_the_summarys_numbers(page: Page, results: Path) -> None:
    show(page, f"file://{results}/report.html")
    summary = json.loads((results / "summary.json").read_text())
    seen = page.evaluate("document.querySelector('main').innerText")
    for condition in summary["conditions"].values():
        assert f"{100 * condition['strict']['accuracy']:.1f}%" in seen
        low, high = condition["strict"]["ci95"]
        assert f"{100 * low:.1f} to {100 * high:.1f}" in seen
        assert f"{condition['rewards']['efficiency']:.3f}" in seen
    for pair in summary["paired"]:
        assert f"{100 * pair['difference']:+.1f}" in seen
    for mode in summary["modes"].values():
        assert f"{mode['tokens_per_second']:,.0f}" in seen
    assert "Variants less control, with-tools" in seen
    assert page.evaluate("document.querySelectorAll('#accuracy ~ .scroll svg .range').length") == 6


def test_a_row_opens_its_trajectory_and_text_stays_text(page: Page, results: Path) -> None:
    show(page, f"file://{results}/report.html")
    wanted = next(s for s in samples(results) if s["mode"] == "with-tools" and s["outcome"] in ("wrong", "invalid"))
    page.fill("#find", wanted["id"])
    for name in ("mode", "variant"):
        page.select_option(f"#{name}", wanted[name])
    assert page.evaluate("document.querySelector('#said').textContent") == "1 to 1 of 1"
    page.evaluate("document.querySelector('#rows button').focus()")
    page.keyboard.press("Enter")
    expect(page.locator(".step")).to_have_count(len(wanted["messages"]))
    steps = page.evaluate("[...document.querySelectorAll('.step')].map((step) => step.innerText)")
    assert [step.split()[0].strip(":") for step in steps] == [message["role"] for message in wanted["messages"]]
    assert HOSTILE in steps[0]
    assert wanted["messages"][1]["tool_calls"][0]["function"]["arguments"] in steps[1]
    assert f"60 + {wanted['turns'][0]['completion_tokens']} tokens" in steps[1]
    assert HOSTILE in steps[3]
    assert page.evaluate("document.querySelector('#rows button').getAttribute('aria-expanded')") == "true"
    assert page.evaluate("document.title") == "GSM8K: fake/model"
    assert page.evaluate("document.querySelectorAll('img').length") == 0
    links = page.evaluate("[...document.querySelectorAll('.opened a')].map((link) => link.href)")
    assert all(Path(link.removeprefix("file://")).is_file() for link in links)
    assert len(links) == 3
    page.keyboard.press("Enter")
    assert page.evaluate("document.querySelectorAll('.step').length") == 0


def test_an_address_names_a_sample(page: Page, results: Path) -> None:
    failed = next(s for s in samples(results) if s["outcome"] == "failed")
    show(page, f"file://{results}/report.html#sample={failed['id']}.{failed['mode']}.{failed['variant']}")
    assert failed["error"] in page.evaluate("document.querySelector('.opened').innerText")


def test_rows_are_sorted_and_chosen(page: Page, results: Path) -> None:
    show(page, f"file://{results}/report.html")

    def column(name: str) -> list[str]:
        return list(page.evaluate(f"[...document.querySelectorAll('#rows td.{name}')].map((cell) => cell.textContent)"))

    tokens = [sum(turn["completion_tokens"] for turn in sample["turns"]) for sample in samples(results)]
    button = "[...document.querySelectorAll('#heads button')].find((one) => one.textContent === 'tokens').click()"
    page.evaluate(button)
    assert column("completion_tokens") == [str(n) for n in sorted(tokens)[:50]]
    page.evaluate(button)
    assert column("completion_tokens") == [str(n) for n in sorted(tokens, reverse=True)[:50]]
    page.evaluate("document.querySelector('#after').click()")
    assert len(column("completion_tokens")) == 10
    page.select_option("#outcome", "truncated")
    assert set(column("outcome")) == {"truncated"}
    page.fill("#find", "no such")
    assert page.evaluate("document.querySelector('#said').textContent") == "no sample fits"


def test_of_a_long_run_some_problems_are_in_the_page_and_the_others_named(
    page: Page, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "STEPS_BYTES", 2048)
    directory = make_results(tmp_path / "run", 40, variants=VARIANTS)
    whole = write_report(directory).stat().st_size
    assert write_report(directory, embed_bytes=3_000).stat().st_size < whole
    show(page, f"file://{directory}/report.html")
    said = re.fullmatch(
        r"(\d+) of 240 .* trajectories/\.", page.evaluate("document.querySelector('#embedded').textContent")
    )
    assert said
    assert 0 < int(said[1]) < 50
    opened = page.evaluate(
        """(async () => {
          for (const row of [...document.querySelectorAll('#rows tr.sample')]) row.click();
          while (document.querySelectorAll('.opened a').length < 150) await new Promise((done) => setTimeout(done, 20));
          return [...document.querySelectorAll('.opened')].map((one) => one.innerText);
        })()"""
    )
    assert len(opened) == 50
    assert any("not in the page" in text for text in opened)
    assert any("Anna has" in text for text in opened)


@pytest.mark.parametrize("width", [1280, 400])
def test_seven_variants_in_two_modes_fit_the_width_of_a_screen(page: Page, tmp_path: Path, width: int) -> None:
    variants = ("control", "frustration", "impatience", "anxiety", "collaborative", "patience", "calm")
    directory = make_results(tmp_path / "run", 4, variants=variants, model=f"someone/{'a-very-long-name-' * 6}")
    page.set_viewport_size({"width": width, "height": 900})
    show(page, f"file://{directory}/report.html")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    tables = "[...document.querySelectorAll('.scroll')]"
    wider = f"{tables}.filter((one) => one.scrollWidth > one.clientWidth).length"
    assert width < 1280 or page.evaluate(wider) == 0  # on a narrow one they are moved sideways, by themselves
    assert page.evaluate("document.querySelectorAll('[aria-labelledby=outcomes] tbody tr').length") == 14


def test_what_is_not_complete_is_said(tmp_path: Path) -> None:
    directory = make_results(tmp_path / "run", 2)
    summary = json.loads((directory / "summary.json").read_text())
    (directory / "summary.json").write_text(json.dumps(summary | {"incomplete": "interrupted <b>"}))
    assert "not complete: interrupted &lt;b&gt;." in write_report(directory).read_text()


def test_the_command_writes_the_page_anew(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = make_results(tmp_path / "run", 2)
    assert main([str(directory)]) == 0
    printed = capsys.readouterr().out
    assert printed.endswith(f"{directory / 'report.html'}\n")
    assert "with-tools - no-tools" in printed  # the paired comparison of the two modes
    before = (directory / "report.html").read_bytes()
    assert main([str(directory)]) == 0
    assert (directory / "report.html").read_bytes() == before


def test_a_directory_without_a_run_has_no_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(EvalError, match="no finished evaluation"):
        write_report(tmp_path)
    assert main([str(tmp_path)]) == 2
    assert "no finished evaluation" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
