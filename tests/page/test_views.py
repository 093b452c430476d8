"""Each view of the page, used as a person uses it, against the served model."""

from __future__ import annotations

import re
import subprocess
import sys

import httpx
import pytest
import torch
from playwright.sync_api import Page, expect

import vitrine
from tests.browsers import link, painted

QUESTION = "Ann has 3 boxes of 12 pens. How many pens is that?"
PROMPT = "Tom has 3 boxes"
MODEL = "vitrine-demo"


def ask(page: Page, text: str = QUESTION) -> None:
    """A chat's question, up to the end of its response."""
    answers = page.locator("article.assistant .under")
    before = answers.count()
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")
    expect(answers).to_have_count(before + 1)
    painted(page)


def options(page: Page, name: str = "Tokens of the response"):
    return page.get_by_role("listbox", name=name).last.get_by_role("option")


def code(page: Page, name: str, form: str = "as Python") -> str:
    """A request of the view as code."""
    page.get_by_text("The requests as Python and curl").click()
    section = page.locator("request-code section", has=page.get_by_text(name, exact=True))
    section.get_by_role("button", name=form).click()
    return section.locator("pre").text_content() or ""


def test_a_chat_shows_what_each_token_was_chosen_from(opened, served):
    page = opened()
    page.get_by_text("Settings").click()
    page.get_by_label("Temperature").fill("0")
    ask(page)
    body = {"model": MODEL, "messages": [{"role": "user", "content": QUESTION}], "temperature": 0, "seed": 0}
    body |= {"logprobs": True, "top_logprobs": 20}
    said = httpx.post(f"{served.base_url}/chat/completions", json=body, timeout=60).json()
    tokens = said["choices"][0]["logprobs"]["content"]
    assert options(page).all_text_contents() == [one["token"].replace("\n", "⏎") for one in tokens]

    options(page).nth(2).hover()
    about = page.get_by_role("complementary", name="Token")
    likeliest = about.get_by_role("listitem")
    expect(likeliest).to_have_count(20)
    assert (tokens[2]["top_logprobs"][1]["token"].strip() or "␣") in likeliest.nth(1).text_content()
    options(page).nth(2).click()
    options(page).nth(0).hover()
    expect(about.locator("dd").first).to_have_text(str(said["usage"]["prompt_tokens"] + 2))  # pinned, it stays
    page.get_by_text("Show as text").click()
    expect(page.locator(".plain[dir=auto]")).to_have_text(said["choices"][0]["message"]["content"])

    page.get_by_role("listbox").focus()
    page.keyboard.press("Escape")
    page.keyboard.press("ArrowRight")  # from the token that was clicked
    expect(about.locator("dd").first).to_have_text(str(said["usage"]["prompt_tokens"] + 3))
    page.keyboard.press("End")
    expect(about.locator("dd").first).to_have_text(str(said["usage"]["prompt_tokens"] + len(tokens) - 1))
    page.get_by_label("Color by").select_option("norm")
    expect(page.locator(".legend")).to_contain_text("norm")
    assert options(page).first.evaluate("one => one.style.backgroundColor")
    done = subprocess.run([sys.executable, "-c", code(page, "Chat")], capture_output=True, text=True, timeout=60)
    assert tokens[0]["token"] in done.stdout, done.stderr


def test_a_lens_reads_every_layer_and_a_cell_is_dragged_onto_another_token(opened, served):
    page = opened("#lens")
    page.get_by_label("Text").fill(PROMPT)
    page.get_by_role("button", name="Read the layers").click()
    cells = page.get_by_role("gridcell")
    expect(cells.last).to_have_attribute("aria-label", re.compile("%$"))
    lens = {"layers": "all", "top_k": 1, "tokens": "all", "targets": "last_layer"}
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 0, "logit_lens": lens}
    answer = httpx.post(f"{served.base_url}/completions", json=body, timeout=60).json()
    found = answer["choices"][0]["logit_lens"]["prompt"]
    want = [one["layers"][-1]["top"][0]["token"] for one in found]
    row = page.locator(f"[aria-rowindex='{len(found)}']").get_by_role("gridcell")
    assert row.last.get_attribute("aria-label").startswith(f"layer 5 after {found[-1]['token']}: {want[-1]}")
    assert page.locator("[role=rowheader].answer").count()  # the generated tokens' columns follow

    row.nth(4).click()
    expect(page.get_by_role("complementary").get_by_role("listitem")).to_have_count(20)
    row.nth(4).drag_to(page.locator("[aria-rowindex='2']").get_by_role("gridcell").nth(1))
    expect(page.locator(".patched [role=status]")).to_contain_text("completion")
    expect(page.locator(".patched h2")).to_contain_text("Layer 4 at")
    body = code(page, "The patched completion", "as curl")
    assert '"op":"replace","point":"layers.1.output","tokens":{"positions":[1]}' in body
    page.get_by_label("Color by").select_option("rank")
    expect(page.locator(".legend").first).to_contain_text("above 1000")
    expect(row.last).to_have_attribute("aria-label", re.compile(r"rank \d+$"))
    ranks = [one["targets"][0]["rank"] for one in found[-1]["layers"]]
    labels = [cell.get_attribute("aria-label") or "" for cell in row.all()]
    assert [int(label.rpartition("rank ")[2]) for label in labels] == ranks


def test_layers_are_read_through_an_installed_lens_which_a_link_names(opened, install):
    maps = {"layers.0.weight": torch.zeros(192, 192), "layers.0.bias": torch.linspace(-1, 1, 192)}
    install(maps, "page-lens", "lenses", kind="tuned")
    page = opened("#lens")
    page.get_by_label("Text").fill(PROMPT)
    page.get_by_role("button", name="Read the layers").click()
    first = page.locator("[aria-rowindex='2']").get_by_role("gridcell").first
    expect(first).to_have_attribute("aria-label", re.compile("%$"))
    plain = first.get_attribute("aria-label") or ""
    page.get_by_label("Read through").select_option("page-lens")
    expect(first).not_to_have_attribute("aria-label", plain)
    assert '"lens":"page-lens"' in code(page, "The lens", "as curl")
    other = opened(link(page))
    expect(other.get_by_label("Read through")).to_have_value("page-lens")


def test_what_is_shown_stays_its_models_when_another_is_chosen(opened):
    page = opened()
    both = {"data": [{"id": MODEL}, {"id": "another"}]}
    page.route("**/v1/models", lambda route: route.fulfill(json=both))
    page.reload()
    chooser = page.locator("#model")
    expect(chooser.locator("option")).to_have_count(2)
    asked: list[str] = []
    page.on("request", lambda one: one.url.endswith("/completions") and asked.append(one.post_data_json["model"]))
    page.get_by_label("Store activations").check()
    ask(page)
    chooser.select_option("another")
    page.get_by_label("Color by").select_option("probability")
    page.get_by_label("Point", exact=True).evaluate("one => { one.value = 'embed.output'; }")
    page.get_by_label("Color by").select_option("norm")
    page.get_by_role("button", name="Lens grid").press("Enter")
    expect(page.get_by_role("main", name="Lens")).to_be_focused()
    expect(chooser).to_have_value(MODEL)
    expect(page.get_by_role("gridcell").last).to_have_attribute("aria-label", re.compile("%$"))
    chooser.select_option("another")
    page.get_by_role("gridcell").last.click()
    expect(page.get_by_role("complementary").get_by_role("listitem")).to_have_count(20)
    other = opened(link(page))
    expect(other.locator("#model")).to_have_value(MODEL)
    page.get_by_role("button", name="Read the layers").click()
    expect(page.locator("main .error")).to_contain_text(f"those of the model {MODEL}")
    assert set(asked) == {MODEL}


def test_a_model_without_attention_patterns_says_what_to_start_it_with(opened):
    page = opened("#attention")
    refused = {"message": "it gives none", "code": "no_attention_patterns", "param": "capture.points"}
    page.route("**/v1/completions", lambda route: route.fulfill(status=400, json={"error": refused}))
    page.get_by_role("button", name="Show the heads").click()
    expect(page.locator("main .error")).to_contain_text("Start the server with attention=eager")


def test_both_answers_of_steering_begin_from_one_seed(opened):
    page = opened("#steer")
    page.get_by_label("Prompt").fill(PROMPT)
    page.get_by_text("Length and sampling").click()
    page.get_by_label("Temperature").fill("1")
    page.get_by_label("Max new tokens").fill("12")
    page.get_by_label("Strength").fill("0")
    page.get_by_role("button", name="Generate with and without").click()
    default, steered = (options(page, f"{name}: tokens of the completion") for name in ("Default", "Steered"))
    expect(page.get_by_text("tick “as a chat message”")).to_be_visible()
    painted(page)
    assert default.all_text_contents() == steered.all_text_contents()
    page.get_by_label("Strength").fill("2")
    page.get_by_role("button", name="Generate with and without").click()
    expect(page.get_by_text(re.compile("length [1-9].* at layers.3.output.*The completions differ"))).to_be_visible()
    painted(page)
    assert default.all_text_contents() != steered.all_text_contents()


def test_rows_are_capped_along_a_direction_or_rotated_toward_it(opened):
    page = opened("#steer")
    page.get_by_label("Prompt").fill(PROMPT)
    page.get_by_text("Length and sampling").click()
    page.get_by_label("Max new tokens").fill("4")
    sent = {}
    for change, label, number in (("cap", "At most", "-30"), ("rotate", "Degrees", "45")):
        page.get_by_label("Change").select_option(change)
        page.get_by_label(label).fill(number)
        expect(page.get_by_label("Strength")).to_be_hidden()
        with page.expect_request(lambda request: "interventions" in (request.post_data or "")) as asked:
            page.get_by_role("button", name="Generate with and without").click()
        (sent[change],) = asked.value.post_data_json["interventions"]
        expect(page.get_by_text(re.compile("Changed .* activation vectors at layers.3.output by"))).to_be_visible()
    assert (sent["cap"]["op"], sent["cap"]["max"]) == ("clamp_projection", -30)
    assert (sent["rotate"]["op"], sent["rotate"]["angle"]) == ("rotate", 45)
    difference = [b - a for a, b in zip(sent["rotate"]["vector"], sent["rotate"]["toward"], strict=True)]
    assert difference == pytest.approx(sent["cap"]["vector"], abs=1e-5)
    page.get_by_label("From", exact=True).select_option("tensor")  # a single direction spans no plane
    expect(page.get_by_label("Change")).to_have_value("add")


def test_attention_is_that_of_the_model(opened, served):
    page = opened("#attention")
    page.get_by_label("Text").fill(PROMPT)
    page.get_by_label("Layer").select_option("2")
    page.get_by_role("button", name="Show the heads").click()
    page.get_by_role("button", name="head 1").click()
    capture = {"points": ["layers.2.attention.weights"], "mode": "trace", "return": "inline"}
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 0, "capture": capture}
    answer = httpx.post(f"{served.base_url}/completions", json=body, timeout=60).json()
    run = answer["activations_meta"]["runs"][0]
    names = [one if one.strip() else "␣" for one in options(page, "Tokens; the one you point at").all_text_contents()]
    assert page.locator(".down span").all_text_contents() == names
    assert page.locator(".across span").all_text_contents() == names
    shares = run["points"]["layers.2.attention.weights"]["data"][-1][1]
    expect(page.locator(".from[role=status]")).to_contain_text(
        f"({shares.index(max(shares))}) {max(shares) * 100:.0f}%"
    )


def test_a_stored_run_opens_from_what_is_stored_and_downloads(opened, tmp_path):
    page = opened()
    page.get_by_label("Store activations").check()
    page.get_by_label("Points").fill("layers.1.output, layers.1.attention.weights")
    page.get_by_label("Session").fill("page-tests")
    ask(page)
    ask(page, "And of 5 boxes?")
    page.get_by_label("Points").fill("layers.2.output")  # of the next answers
    page.get_by_label("Point", exact=True).evaluate("one => { one.value = 'layers.1.output'; }")
    with page.expect_request("**/files/*"):  # what is stored is not asked of the model again
        page.get_by_label("Color by").select_option("norm")
    page.get_by_label("Point", exact=True).fill("layers.*.mlp.output")
    page.get_by_label("Point", exact=True).press("Enter")
    expect(page.locator("main .error")).to_contain_text("names 6 points")
    page.get_by_role("button", name="Stored run", exact=True).last.click()
    strip = options(page, "Tokens of the run")
    expect(strip.last).to_be_visible()
    strip_length = strip.count()
    page.get_by_label("Color by").last.select_option("norm")
    expect(page.locator("main .legend")).to_contain_text("norm")
    run = page.get_by_role("heading", level=2, name="run-").text_content()
    with page.expect_download() as begun:
        page.get_by_role("button", name="Download").last.click()
    assert begun.value.suggested_filename.endswith(".arrow")
    begun.value.save_as(tmp_path / "fetched.arrow")
    assert len(vitrine.load(tmp_path / "fetched.arrow", run_id=run)["layers.1.output"]) == strip_length
    page.route("**/files/*", lambda route: None)
    page.get_by_role("button", name="Download").last.click()
    page.get_by_role("button", name="Stop").click()
    expect(page.get_by_role("button", name="Download", exact=True).last).to_be_enabled()
    page.unroute("**/files/*")
    page.get_by_label("Point", exact=True).select_option("layers.2.output")
    expect(page.get_by_text("Computed now, with interventions left out")).to_be_visible()
    assert '["layers.*.input", "layers.*.resid_mid", "layers.*.output"]' in code(page, "To record the residual stream")
    page.get_by_label("Point", exact=True).select_option("layers.1.output")
    expect(page.get_by_text("Computed now, with interventions left out")).to_be_hidden()
    colour = page.get_by_label("Color by").last
    colour.select_option("probability")
    expect(page.locator("main .error")).to_contain_text("Probabilities are not stored")
    expect(page.locator("main .legend")).to_contain_text("norm")  # of the colours that are still there
    page.get_by_role("button", name="Score the tokens now").click()
    expect(page.get_by_text("Scored now")).to_be_visible()
    expect(strip.last).to_have_attribute("style", re.compile("background"))
    colour.select_option("norm")
    strip.nth(2).click()
    other = opened(link(page))
    expect(options(other, "Tokens of the run").last).to_have_attribute("style", re.compile("background"))
    expect(options(other, "Tokens of the run").nth(2)).to_have_attribute("aria-selected", "true")
    expect(other.get_by_role("complementary").locator("dt", has_text="norm")).to_be_visible()
    page.get_by_role("button", name="Attention, as stored").click()
    expect(page.get_by_role("heading", name="Layer 1, head 0")).to_be_visible()
    asked = [sys.executable, "-c", code(page, "The stored pattern")]
    assert run in subprocess.run(asked, capture_output=True, text=True, check=True, timeout=60).stdout


def test_two_runs_are_compared_token_by_token_in_light_and_dark(opened, served, accessible, eventually):
    session = "page-compared"
    capture = {"points": ["layers.1.output"], "mode": "trace"}
    for prompt in (PROMPT, f"{PROMPT} of 4 pens"):
        body = {"model": MODEL, "prompt": prompt, "capture": capture, "session_id": session}
        assert httpx.post(f"{served.base_url}/completions", json=body, timeout=60).status_code == 200
    listed = f"{served.base_url}/activations/runs?session={session}"
    eventually(lambda: httpx.get(listed, timeout=60).json()["data"], lambda runs: len(runs) == 2)
    page = opened("#runs", color_scheme="light", bypass_csp=True)
    page.get_by_role("button", name=session, exact=True).click()
    boxes = page.get_by_role("checkbox", name="Compare")
    expect(boxes).to_have_count(2)
    for box in boxes.all():
        box.check()
    page.get_by_role("button", name="Compare the two").click()
    tokens = page.get_by_role("list", name="Tokens of both runs").get_by_role("listitem")
    expect(tokens.first).to_contain_text("token 0: the same")
    expect(tokens.last).to_contain_text("differs")
    page.get_by_label("How far apart at").select_option("layers.1.output")
    expect(page.locator("main .legend")).to_contain_text("cosine")
    expect(tokens.first).to_contain_text("1 – cosine 0.000")
    light = tokens.first.evaluate("one => getComputedStyle(one).backgroundColor")
    page.emulate_media(color_scheme="dark")
    expect(tokens.first).not_to_have_css("background-color", light)
    accessible(page, "compare")


def test_runs_are_found_by_their_tags(opened, served):
    tags = {"condition": "<b>control</b>"}
    capture = {"points": ["norm.output"], "mode": "trace", "tags": tags}
    body = {"model": MODEL, "prompt": PROMPT, "capture": capture, "session_id": "page-tags"}
    assert httpx.post(f"{served.base_url}/completions", json=body, timeout=60).status_code == 200
    page = opened("#runs")
    expect(page.get_by_role("row").nth(1)).to_contain_text("page-tags")  # the last used one
    page.get_by_text("Filters").click()
    page.get_by_role("textbox", name="Tag").fill("condition=<b>control</b>")
    page.get_by_role("button", name="Find").click()
    expect(page.get_by_role("row")).to_have_count(2)
    page.get_by_role("textbox", name="Model").fill(MODEL)
    page.get_by_role("button", name="page-tags", exact=True).press("Enter")
    expect(page.get_by_role("heading", name="page-tags")).to_be_focused()
    expect(page.get_by_role("cell", name="condition=<b>control</b>").first).to_be_visible()
    expect(page.get_by_role("row").nth(1)).to_contain_text(PROMPT)
    other = opened(link(page))
    expect(other.locator("form.filters input").first).to_have_value(MODEL)
    page.get_by_role("textbox", name="Tag").fill("condition=other")
    page.get_by_role("button", name="Find").click()
    expect(page.get_by_text("No run fits")).to_be_visible()
    page = opened("#runs")
    session = page.get_by_role("button", name="page-tags", exact=True)
    for sure in (False, True):
        expect(session).to_be_visible()
        page.once("dialog", lambda dialog, sure=sure: dialog.accept() if sure else dialog.dismiss())
        page.get_by_role("button", name="Delete page-tags").click()
    expect(session).to_have_count(0)
    assert httpx.get(f"{served.base_url}/activations/session/page-tags", timeout=60).status_code == 404


@pytest.mark.parametrize("view", ["chat", "lens", "steer", "attention", "runs"])
def test_a_link_opens_a_view_as_it_was_and_asks_the_model_nothing(opened, served, view):
    page = opened(f"#{view}")
    label = {"chat": "Message", "lens": "Text", "steer": "Prompt", "attention": "Text", "runs": "Tag"}[view]
    if view == "runs":
        page.get_by_text("Filters").click()
    expect(page.locator("#model option")).to_have_count(1)
    page.get_by_label(label, exact=True).fill("é 北京 “pens”")
    fragment = link(page)
    other = opened()
    asked: list[str] = []
    other.on("request", lambda request: asked.append(f"{request.method} {request.url}"))
    other.goto(f"{served.root}/{fragment}")
    expect(other.get_by_label(label, exact=True)).to_have_value("é 北京 “pens”")
    assert not [one for one in asked if one.startswith("POST")]


def test_no_view_breaks_a_rule_of_accessibility(opened, accessible, served):
    body = {"model": MODEL, "prompt": PROMPT, "capture": {"points": ["layers.1.output"]}, "session_id": "page-axe"}
    assert httpx.post(f"{served.base_url}/completions", json=body, timeout=60).status_code == 200
    page = opened(color_scheme="light", viewport={"width": 1280, "height": 900}, bypass_csp=True)
    ask(page)
    options(page).nth(1).click()
    accessible(page, "chat")
    strongest = page.locator("main .legend").first.locator(".swatch").last  # of 100% in both views
    in_chat = strongest.evaluate("one => one.style.backgroundColor")
    page.get_by_role("button", name="Lens grid").click()
    cell = page.get_by_role("gridcell").last
    expect(cell).to_have_attribute("aria-label", re.compile("%$"))
    cell.click()
    page.get_by_role("button", name="Patch it there").click()
    expect(page.locator(".patched [role=status]")).to_contain_text("completion")
    accessible(page, "lens")
    assert strongest.evaluate("one => one.style.backgroundColor") == in_chat
    page.get_by_role("link", name="Chat").click()
    page.get_by_role("button", name="Attention").click()
    expect(page.get_by_role("button", name="head 0")).to_be_visible()
    accessible(page, "attention")
    page.get_by_role("link", name="Steer").click()
    page.get_by_role("button", name="Generate with and without").click()
    expect(page.get_by_text("where activation vectors are")).to_be_visible()
    accessible(page, "steer")
    page.get_by_role("link", name="Stored runs").click()
    expect(page.get_by_role("table", name="Sessions")).to_be_visible()
    accessible(page, "sessions")
    page.get_by_role("button", name="page-axe", exact=True).click()
    page.get_by_role("button", name=re.compile("^run-")).click()
    expect(options(page, "Tokens of the run").last).to_be_visible()
    page.get_by_label("Color by").last.select_option("probability")
    expect(page.locator("main .error")).to_be_visible()
    accessible(page, "a run")
    page.get_by_role("link", name="Probes").click()
    page.get_by_role("region", name="Probes", exact=True).get_by_text("The requests as Python and curl").click()
    accessible(page, "readouts")
    page.get_by_role("button", name="API key").click()
    page.set_viewport_size({"width": 390, "height": 800})
    accessible(page, "narrow")
    for name in ("Chat", "Lens", "Steer", "Attention", "Stored runs", "Probes"):
        page.get_by_role("link", name=name).click()
        expect(page.get_by_role("region", name=name, exact=True)).to_be_visible()
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), name
