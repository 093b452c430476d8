"""Readouts on the page: listed, searched in a session, coloured by, and steered with."""

from __future__ import annotations

import json
import re

import httpx
import pytest
import torch
from playwright.sync_api import Page, Route, expect
from safetensors.torch import load

from tests.browsers import link, painted

MODEL, WIDTH, POINT = "vitrine-demo", 192, "layers.3.output"
FEATURES = 64
SESSION = "page-readouts"
DESCRIPTION = "Random weights, for tests. " * 30 + "The end."
TEXTS = ("Tom has 3 boxes of 4 pens.", "Ann reads a book about the sea.", "Sam has 9 pens.")


@pytest.fixture(scope="module")
def installed(served, install):
    """A probe of two values, an autoencoder, and a session of three runs; their tokens with its values."""
    random = torch.Generator().manual_seed(3)
    weight = torch.randn(2, WIDTH, generator=random) / 2000
    probe = {"name": "page-probe", "kind": "linear", "activation": "sigmoid", "labels": ["sum", "<b>"]}
    install({"weight": weight}, point=POINT, **probe)
    encoder = torch.randn(WIDTH, FEATURES, generator=random) / 14
    tensors = {"W_enc": encoder, "W_dec": encoder.T.contiguous(), "b_enc": torch.zeros(FEATURES)}
    sae = {"name": "page-sae", "kind": "sae", "activation": "relu", "description": DESCRIPTION}
    install(tensors | {"b_dec": torch.zeros(WIDTH)}, point=POINT, **sae)
    said = []
    for text in TEXTS:
        body = {"model": MODEL, "prompt": text, "max_tokens": 0, "session_id": SESSION, "return_token_ids": True}
        body |= {"capture": {"points": [POINT]}, "readouts": ["page-probe", {"name": "page-sae", "top_k": FEATURES}]}
        (choice,) = httpx.post(f"{served.base_url}/completions", json=body, timeout=60).json()["choices"]
        rows = choice["readouts"]["page-sae"]["prompt"]["values"]
        for token, row in zip(choice["prompt_token_ids"], rows, strict=True):
            said.append((token, {one["feature"]: one["value"] for one in row}))
    return said


def options(page: Page):
    return page.get_by_role("listbox", name="Tokens of the response").last.get_by_role("option")


def ground(page: Page, index: int) -> str:
    return options(page).nth(index).evaluate("one => one.style.backgroundColor")


def test_a_features_strongest_tokens_are_found_in_a_session(opened, accessible, installed):
    page = opened("#readouts", color_scheme="light", bypass_csp=True)
    expect(page.get_by_role("row", name=re.compile("page-probe linear .* sum, <b>"))).to_be_visible()
    page.get_by_role("button", name="page-sae").press("Enter")
    expect(page.get_by_role("heading", name="page-sae")).to_be_focused()
    expect(page.locator(".facts")).to_contain_text(DESCRIPTION)
    feature = max(installed[-1][1], key=installed[-1][1].__getitem__)
    want = dict(sorted((token, row[feature]) for token, row in installed if row.get(feature, 0) > 0))
    page.get_by_label("Feature", exact=True).fill(str(feature))
    page.get_by_label("Session").fill(SESSION)
    page.get_by_label("First runs to read").fill("2")
    page.get_by_role("button", name="Find the strongest tokens").click()
    expect(page.get_by_text("of the first 2 runs; there are more runs")).to_be_visible()
    page.get_by_label("First runs to read").fill("3")
    page.get_by_role("button", name="Find the strongest tokens").press("Enter")
    expect(page.get_by_text(re.compile(f"Read {len(installed)} tokens of the first 3 runs"))).to_be_visible()
    found = page.get_by_role("table", name=f"The strongest tokens of feature {feature} of page-sae")
    shown = [float(text) for text in found.locator("tbody tr td:first-child").all_text_contents()]
    assert shown == pytest.approx(sorted(want.values(), reverse=True)[:30], rel=1e-3)
    assert found.locator("mark").first.evaluate("one => one.style.backgroundColor")
    accessible(page, "readouts")

    other = opened(link(page))
    expect(other.get_by_label("Feature", exact=True)).to_have_value(str(feature))
    expect(other.get_by_label("Session")).to_have_value(SESSION)
    assert other.get_by_role("table").count() == 1  # the link has the model read nothing
    found.get_by_role("button").first.click()
    tokens = page.get_by_role("listbox", name="Tokens of the run").get_by_role("option")
    expect(tokens.last).to_be_visible()
    page.get_by_label("Color by").select_option("readout")
    page.get_by_label("Probe or autoencoder").select_option("page-probe/0")
    expect(page.locator("main .legend")).to_contain_text("page-probe: sum")
    other = opened(link(page))
    expect(other.locator("main .legend")).to_contain_text("page-probe: sum")
    for readout, computed in (("page-probe/1", 0), ("page-sae", 1)):  # the first is stored with the run
        page.get_by_label("Color by").select_option("readout")
        page.get_by_label("Probe or autoencoder").select_option(readout)
        expect(page.locator("main .legend")).to_contain_text(readout.partition("/")[0])
        expect(page.get_by_text("Computed now, with interventions left out")).to_have_count(computed)
        assert tokens.first.evaluate("one => one.style.backgroundColor")
        other = opened(link(page))
        if computed:  # no link has the model work
            other.locator("p", has_text="This color is not stored").get_by_role("button").click()
        expect(other.locator("main .legend")).to_contain_text(readout.partition("/")[0])
        expect(other.locator("token-strip [role=option]").first).to_have_attribute("style", re.compile("background"))


def test_stopping_a_search_keeps_what_was_found_and_asks_for_no_more(opened, installed):
    page = opened("#readouts")
    page.get_by_role("button", name="page-probe").click()
    page.get_by_label("Session").fill(SESSION)
    asked: list[str] = []

    def held(route):
        asked.append(route.request.post_data)
        if len(asked) == 1:
            route.continue_()  # the values of the second run never come

    page.route("**/v1/completions", held)
    with page.expect_request(lambda request: len(asked) == 1 and "completions" in request.url):
        page.get_by_role("button", name="Find the strongest tokens").click()
    expect(page.get_by_text("Reading run 2 of 3")).to_be_visible()
    found = page.get_by_role("table", name="The strongest tokens")
    expect(found).to_be_visible()
    with page.expect_event("requestfailed") as ended:
        page.get_by_role("button", name="Stop").click()
    assert ended.value.failure == "net::ERR_ABORTED"  # the server's slot is free
    expect(page.get_by_text("Stopped. Reading run 2 of 3")).to_be_visible()
    expect(page.get_by_role("button", name="Stop")).to_be_hidden()
    expect(page.get_by_role("button", name="Find the strongest tokens")).to_be_enabled()
    assert found.locator("tbody tr").count()
    assert len(asked) == 2
    with page.expect_request("**/v1/completions"):
        page.get_by_role("button", name="Find the strongest tokens").click()
    expect(page.get_by_text("Reading run 1 of 3")).to_be_visible()
    with page.expect_event("requestfailed"):
        page.get_by_role("link", name="Chat").click()  # nobody looks at what the search finds


def test_what_is_not_there_is_said_with_what_to_do(opened, installed):
    page = opened("#readouts")
    page.route("**/v1/activations/sessions*", lambda route: route.fulfill(json={"data": [], "has_more": False}))
    page.get_by_role("button", name="page-sae").click()
    expect(page.get_by_label("Session")).to_have_attribute("placeholder", "none is stored")
    page.get_by_role("button", name="Find the strongest tokens").click()
    expect(page.get_by_text(f"No run of {MODEL} is stored")).to_be_visible()
    page.get_by_label("Session").fill("no-such-session")
    page.get_by_role("button", name="Find the strongest tokens").click()
    expect(page.get_by_text("The session no-such-session has no run")).to_be_visible()
    page.route("**/v1/readouts*", lambda route: route.fulfill(json={"data": [], "has_more": False}))
    page.reload()
    expect(page.get_by_text("No probe is installed")).to_be_visible()
    expect(page.get_by_text("python -m deployments.readouts add PROBE")).to_be_visible()


def test_a_chat_is_coloured_by_a_readout_as_its_values_come_and_afterwards(opened, served, installed):
    page = opened()
    requests: list[str] = []
    page.on("request", lambda request: request.method == "POST" and requests.append(request.post_data or ""))
    page.get_by_label("Color by").select_option("readout")
    page.get_by_label("Probe or autoencoder").select_option("page-probe/0")
    page.get_by_label("Message", exact=True).fill(TEXTS[0])
    page.keyboard.press("Enter")
    expect(page.locator(".under")).to_be_visible()
    expect(page.locator("main .legend")).to_contain_text("page-probe: sum (probability)")
    (asked,) = requests  # the values came with the answer
    assert json.loads(asked)["readouts"] == ["page-probe"]
    painted(page)
    assert ground(page, 0)
    assert ground(page, 0) != ground(page, 1)
    body = json.loads(asked) | {"stream": False}
    answer = httpx.post(f"{served.base_url}/chat/completions", json=body, timeout=60).json()
    values = answer["choices"][0]["readouts"]["page-probe"]["generated"]["values"][0]
    options(page).first.hover()
    about = page.get_by_role("complementary", name="Token")
    expect(about).to_contain_text(f"page-probe: sum{float(f'{values[0]:.4g}')} probability")
    expect(about).to_contain_text(f"page-probe: <b>{float(f'{values[1]:.4g}')} probability")

    page.get_by_label("Probe or autoencoder").select_option("page-sae")
    page.get_by_label("Feature", exact=True).fill("5")
    page.get_by_label("Feature", exact=True).press("Enter")
    expect(page.locator("main .legend")).to_contain_text("feature 5 of page-sae (activation)")
    computed = [json.loads(one) for one in requests[1:]]
    assert computed
    assert all(one["max_tokens"] == 0 and one["readouts"][0]["name"] == "page-sae" for one in computed)
    page.mouse.move(0, 0)  # details are those of when the mouse comes to a token
    options(page).first.hover()
    expect(about).to_contain_text("feature 5 of page-sae")


def test_a_feature_of_an_autoencoder_steers_and_the_report_says_by_how_much(opened, installed):
    page = opened("#readouts")
    page.get_by_role("button", name="page-sae").click()
    page.get_by_label("Feature", exact=True).fill("7")
    page.get_by_role("button", name="Steer with the feature").click()
    expect(page.get_by_label("Autoencoder", exact=True)).to_have_value("page-sae")
    expect(page.locator("fieldset").get_by_label("Feature", exact=True)).to_have_value("7")
    page.get_by_label("Added to its value").fill("600")
    page.get_by_label("Prompt").fill("Tom has 3 boxes")
    page.get_by_text("Length and sampling").click()
    page.get_by_label("Max new tokens").fill("8")
    page.get_by_role("button", name="Generate with and without").click()
    told = page.get_by_text(re.compile(rf"Changed \d+ activation vectors at {POINT} by \d+% of their length"))
    expect(told).to_be_visible()
    assert answered(page, "Default") != answered(page, "Steered")


def answered(page: Page, name: str) -> list[str]:
    painted(page)
    strip = page.get_by_role("listbox", name=f"{name}: tokens of the completion")
    return strip.get_by_role("option").all_text_contents()


def test_a_probe_steers_in_the_direction_in_which_its_value_grows(opened, served, installed):
    page = opened("#readouts")
    page.get_by_role("button", name="page-probe").click()
    page.get_by_label("Value", exact=True).select_option("1")
    page.route("**/v1/readouts?*", lambda _: None)  # the list of probes is late
    page.get_by_role("button", name="Steer with the probe").click()
    expect(page.get_by_label("Probe", exact=True)).to_have_value("page-probe/1")
    page.get_by_label("Prompt").fill("Tom has 3 boxes")
    page.get_by_label("Strength").fill("2")
    page.get_by_text("Length and sampling").click()
    page.get_by_label("Max new tokens").fill("8")
    page.unroute("**/v1/readouts?*")
    held: list[Route] = []
    page.route("**/v1/completions", lambda route: held.append(route))
    with page.expect_request(lambda request: "interventions" in (request.post_data or "")) as asked:
        page.get_by_role("button", name="Generate with and without").click()
    page.get_by_label("Strength").fill("0.5")  # of the next answers
    for route in held:
        route.continue_()
    told = page.get_by_text(re.compile(f"Added a vector of length .* at {POINT}"))
    expect(told).to_be_visible()
    length, rows = re.findall(r"length ([\d.]+) at .* activation vectors are ([\d.]+) long", told.text_content())[0]
    assert float(length) == pytest.approx(2 * float(rows), rel=0.01)
    (change,) = asked.value.post_data_json["interventions"]
    weight = load(httpx.get(f"{served.base_url}/readouts/page-probe/file", timeout=60).content)["weight"]
    assert (change["point"], change["unit"], change["scale"]) == (POINT, "residual_norm", 2)
    assert change["vector"] == pytest.approx(weight[1].tolist())
    assert answered(page, "Default") != answered(page, "Steered")
