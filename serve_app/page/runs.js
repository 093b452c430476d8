// Stored runs: a list, and the stored values of one in the same views as new requests.

import { bytes, call, get } from "./api.js";
import { colouring } from "./colouring.js";
import { comparison } from "./compare.js";
import { button, choose, empty, field, goTo, h, keepingFocus, number, table, visible } from "./dom.js";
import { complete, fileOf, storedSessions, storedTokens, textsOf } from "./recompute.js";
import { COLUMN } from "./scales.js";
import { asText } from "./state.js";
import { details, onLook, pinning, tokenPane } from "./tokens.js";
import { work } from "./work.js";
import "./code.js";

const SHOWN = 50; // sessions or runs of a page
const PREVIEW = 24; // tokens of a listed run's prompt, and as many of its answer
const PATTERN = ".attention.weights";
const RESIDUAL = /^layers\.\d+\.(input|resid_mid|output)$/;

export function view(app) {
  const filters = Object.fromEntries(["model", "tag", "sample_id", "since", "until"].map((name) => [name, h("input", { spellcheck: false })]));
  filters.since.type = filters.until.type = "datetime-local";
  filters.tag.placeholder = "name=value";
  const form = h(
    "form",
    { class: "filters", onsubmit: (event) => (event.preventDefault(), list()) },
    field("Model", filters.model),
    field("Tag", filters.tag),
    field("Sample", filters.sample_id),
    field("Since", filters.since),
    field("Until", filters.until),
    h("button", { class: "main" }, "Find"),
  );
  const held = h("div");
  const opened = h("div");
  const about = tokenPane();
  const trouble = h("div");
  const code = document.createElement("request-code");
  const element = h("section", { "aria-label": "Stored runs" }, h("details", {}, h("summary", {}, "Filters"), form), trouble, held, opened, code);
  form.addEventListener("input", app.changed);
  let session = "";
  let run = "";
  let other = "";
  let listed = ""; // the session whose runs are listed
  let colour = {}; // of the open run
  let loaded = false;
  const reading = work({ trouble, home: () => (opened.querySelector("h2") ?? held.querySelector("h2, .scroll, .empty")) });
  const extra = h("div"); // errors of scoring a run's tokens, and
  const scored = h("span", { class: "from", role: "status" });
  const scoring = work({ trouble: extra, what: "scoring", home: () => opened.querySelector("token-strip") });
  const previewing = work({ trouble: h("div") }); // the texts of the listed runs, without which the list is of use, too
  const pins = pinning(app.changed); // of the open run

  const filled = () => {
    const given = Object.entries(filters).filter(([, { value }]) => value);
    return Object.fromEntries(given.map(([name, { type, value }]) => [name, type === "datetime-local" ? new Date(value).getTime() / 1000 : value]));
  };

  /** Runs a step that reads from the server and shows the result. */
  function reads(step) {
    scoring.end();
    return keepingFocus(() => reading.run(step, () => reads(step)), () => held.querySelector("h2, .scroll, .empty"));
  }

  const list = () => (session ? openSession(session) : listSessions());

  function listSessions(first = 0) {
    session = run = other = listed = "";
    app.changed();
    previewing.end();
    opened.replaceChildren();
    return reads(async (signal) => {
      code.note("Sessions", { method: "GET", path: "v1/activations/sessions", query: { ...filled(), limit: 1000 } });
      const found = await storedSessions(filled(), signal);
      if (!found.length) return held.replaceChildren(empty("No stored session fits. A chat stores its activations where “Store activations with the response” is checked; every request does with a capture."));
      const row = (one) => [button(one.id, () => openSession(one.id), { class: "link" }), time(one.updated), String(one.runs), String(one.tokens), size(one.bytes), one.models.join(", "), one.pinned ? "pinned" : "", button("Delete", () => remove(one), { "aria-label": `Delete ${one.id}` })];
      held.replaceChildren(
        table("Sessions, the last used first", ["Session", "Last run", "Runs", "Tokens", "Bytes", "Models", "Pin", "Delete"], found.slice(first, first + SHOWN).map(row)),
        h("p", { class: "row" }, first ? button("From the beginning", () => listSessions()) : null, first + SHOWN < found.length ? button("More", () => listSessions(first + SHOWN)) : null),
      );
    });
  }

  /** Deletes a session after a confirmation, and lists the others. */
  function remove({ id, owner }) {
    if (!confirm(`Delete the session ${id} with all of its runs and files? This cannot be undone.`)) return;
    reads(async () => {
      await call("DELETE", `v1/activations/session/${encodeURIComponent(id)}`, { query: { owner } });
      await listSessions();
    });
  }

  function openSession(id, after = "") {
    session = id;
    run = other = "";
    app.changed();
    opened.replaceChildren();
    return reads((signal) => showSession(after, signal));
  }

  /** Restores the list with its checked runs, if there is one. */
  function close() {
    if (listed !== session) return openSession(session);
    for (const one of [reading, scoring]) one.end();
    run = other = "";
    opened.replaceChildren();
    goTo(held.querySelector("h2"));
    return app.changed();
  }

  async function showSession(after, signal) {
    const query = { ...filled(), session, limit: SHOWN, ...(after ? { after } : {}) };
    const { data, has_more: more } = await get("v1/activations/runs", query, signal);
    code.note("Runs", { method: "GET", path: "v1/activations/runs", query });
    const boxes = new Map();
    const compare = button("Compare the two", () => {
      const [one, two] = [...boxes].filter(([, box]) => box.checked).map(([id]) => id);
      openRun(one, two);
    }, { disabled: true });
    const texts = data.map((one) => [one, h("span", { class: "words" }, "…")]);
    const row = ([one, text]) => {
      const box = h("input", { type: "checkbox", "aria-label": `Compare ${one.run_id}`, onchange: () => (compare.disabled = [...boxes.values()].filter(({ checked }) => checked).length !== 2) });
      boxes.set(one.run_id, box);
      return [box, button(one.run_id, () => (pins.write(), openRun(one.run_id)), { class: "link" }), text, time(one.created), one.model, `${one.prompt_tokens} + ${one.tokens - one.prompt_tokens}`, String(Object.keys(one.points).length), visible(one.sample_id ?? ""), h("span", { class: "words" }, tagsOf(one)), one.finish_reason ?? ""];
    };
    const heads = ["Compare", "Run", "Text, the completion marked", "Made", "Model", "Tokens", "Points", "Sample", "Tags", "End"];
    listed = session;
    held.replaceChildren(
      h("div", { class: "row" }, button("All sessions", () => listSessions()), h("h2", {}, session), ...downloads(session, "", trouble)),
      data.length ? table(`Runs of ${session}`, heads, texts.map(row)) : empty("No run fits the filters."),
      h("p", { class: "row" }, compare, more ? button("More", () => openSession(session, data.at(-1).run_id)) : null),
    );
    previewing.run(async (end) => {
      for (const [facts, text] of texts) text.replaceChildren(...(await preview(facts, end)));
    });
  }

  /** The end of a run's prompt and the beginning of its answer, or why they cannot be read. */
  async function preview(facts, signal) {
    try {
      const { ids, positions } = await storedTokens(facts, signal);
      const begins = positions.filter((at) => at < facts.prompt_tokens).length;
      const from = Math.max(begins - PREVIEW, 0);
      const { texts } = await textsOf(facts.model, ids.slice(from, begins + PREVIEW), signal);
      const [prompt, answer] = [texts.slice(0, begins - from), texts.slice(begins - from)].map((some) => some.map(visible).join(""));
      return [from ? "… " : "", prompt, answer ? h("mark", {}, answer) : ""];
    } catch (error) {
      if (!error.status) throw error; // stopped, or the server is away
      return [error.message];
    }
  }

  async function openRun(id, second = "") {
    run = id;
    other = second;
    app.changed();
    await reads(async (signal) => {
      const waits = h("p", { class: "row" }, h("span", { class: "wait", role: "status" }, "Reading the run…"), reading.stop);
      opened.replaceChildren(waits);
      try {
        const found = await Promise.all([id, second].filter(Boolean).map((one) => readRun(one, signal)));
        if (second) comparison(opened, ...found);
        else show(found[0]);
        opened.scrollIntoView({ block: "start" });
        if (element.contains(document.activeElement)) goTo(opened.querySelector("h2"));
      } catch (error) {
        if (waits.isConnected) opened.replaceChildren(); // otherwise another run was read meanwhile
        throw error;
      }
    });
  }

  /** The stored values of a run, its tokens as texts if its model is served, and what can be computed now. */
  async function readRun(id, signal) {
    const { data } = await get("v1/activations/runs", { run: id, session }, signal);
    if (!data.length) throw new Error(`The session ${session} has no run ${id} any more.`);
    const [facts] = data;
    const { names, ids, positions, isWhole } = await storedTokens(facts, signal);
    const { texts, served } = await textsOf(facts.model, ids, signal);
    const isAble = isWhole && served; // its model can be used again
    const { points } = isAble ? await app.structure(facts.model) : { points: [] };
    signal.throwIfAborted();
    const lacking = points.map(({ name }) => name).filter((name) => RESIDUAL.test(name) && !(name in facts.points));
    const tokens = texts.map((text, i) => ({ text, id: ids[i], part: positions[i] < facts.prompt_tokens ? "prompt" : "answer" }));
    return { facts, names, ids, positions, tokens, served, isWhole, isAble, lacking };
  }

  async function show(of) {
    const { facts, names, ids, tokens } = of;
    const strip = document.createElement("token-strip");
    strip.setAttribute("aria-label", "Tokens of the run");
    strip.set(tokens);
    pins.watch([strip]);
    about.show();
    const colours = colouring(app, { code, stored: true, onchange: () => ((colour = colours.read()), app.changed(), recolour()) });
    colours.setPoints(names.filter((name) => !name.endsWith(PATTERN) && !name.startsWith(COLUMN)), of.lacking);
    colours.write(colour);
    for (const one of [extra, scored]) one.replaceChildren();
    const later = h("div"); // a colour that is not computed automatically
    const look = (index) => about.show(...details(strip.tokens[index], of.positions[index] ?? "", colours.scores(strip, index)));
    const recolour = async () => {
      later.replaceChildren();
      await colours.apply(strip, { model: facts.model, ids, run: facts, positions: of.positions, isWhole: of.isWhole });
      if (!opened.contains(strip)) return;
      if (strip.pinned >= 0) look(strip.pinned);
      colour = colours.read(); // including the choice from a list that arrived meanwhile
      app.changed();
    };
    onLook(strip, look);
    const tags = tagsOf(facts);
    const shapes = names.map((name) => [name, `[${facts.points[name].shape.map((one) => one ?? "…").join(", ")}]`, facts.points[name].dtype]);
    const parts = [
      h("h2", {}, facts.run_id),
      h("p", { class: "from" }, `${facts.model}, ${time(facts.created)}, ${facts.prompt_tokens} + ${facts.tokens - facts.prompt_tokens} tokens${tags ? `, ${tags}` : ""}${of.isWhole ? "" : `; ${tokens.length} of them are stored`}`),
      of.served ? null : empty(`The model ${facts.model} is not served now, so that tokens show as their ids.`),
      h("p", { class: "row" }, ...downloads(session, facts.run_id, trouble), button("Close", close)),
      h("div", { class: "split" }, h("div", {}, colours.element, later, strip, h("p", { class: "row" }, scored, scoring.stop), extra, more(of, strip, recolour)), about.element),
      h("details", {}, h("summary", {}, `Points: ${names.length}`), table("Points", ["Point", "Shape", "Dtype"], shapes)),
    ];
    opened.replaceChildren(...parts.filter(Boolean));
    pins.restore();
    await colours.prepare(facts.model);
    if (!opened.contains(strip)) return;
    if (!colours.costs(facts)) recolour();
    else later.replaceChildren(h("p", { class: "row" }, "This color is not stored with the run.", button("Compute it now", recolour, { disabled: !of.isAble })));
  }

  /** The other views of a run: from stored values, or by the request that would record them. */
  function more(of, strip, recolour) {
    const { facts, names, ids, isAble, lacking } = of;
    const patterns = names.filter((name) => name.endsWith(PATTERN));
    const state = { model: facts.model, ids, count: facts.prompt_tokens };
    const missing = (text, title, act) => h("p", { class: "row" }, h("span", {}, text), button(title, act, { disabled: !isAble }));
    const again = { model: facts.model, prompt: ids, max_tokens: 0 };
    const parts = [h("h3", {}, "Look further")];
    if (patterns.length) {
      const layer = choose(patterns.map((name) => [/layers\.(\d+)\./.exec(name)?.[1] ?? "0", name]), { "aria-label": "Stored pattern" });
      parts.push(h("div", { class: "row" }, button("Attention, as stored", () => app.open("attention", { model: facts.model, session, run: facts.run_id, layer: layer.value }, 0)), layer));
    } else {
      parts.push(missing("Attention was not recorded.", "Compute it now", () => app.open("attention", state, 0)));
      code.note("To record attention", { method: "POST", path: "v1/completions", body: { ...again, capture: { points: [`layers.0${PATTERN}`], mode: "trace" } } });
    }
    if (lacking.length) {
      parts.push(h("p", {}, `${lacking.length} points of the residual stream were not recorded. “Color by” computes one of them now; a request below records them.`));
      const points = [...new Set(lacking.map((name) => name.replace(/\d+/, "*")))];
      code.note("To record the residual stream", { method: "POST", path: "v1/completions", body: { ...again, capture: { points, mode: "trace" } } });
    }
    const score = { ...again, echo: true, logprobs: 5, return_token_ids: true };
    parts.push(missing("The lens is not stored with runs.", "Read it from the model now", () => app.open("lens", state, facts.prompt_tokens)));
    parts.push(missing("Probabilities are not stored with runs.", "Score the tokens now", () => rescore(score, strip, recolour)));
    code.note("To score its tokens", { method: "POST", path: "v1/completions", body: score });
    return h("div", {}, ...parts, of.isWhole ? null : h("p", { class: "from" }, "Not all tokens are stored: the run cannot be asked again."));
  }

  async function rescore(body, strip, recolour) {
    scored.textContent = "Scoring…";
    const tokens = [];
    const ended = await scoring.run((signal) => complete(body, (some) => tokens.push(...some), signal), () => rescore(body, strip, recolour));
    if (ended === null) return; // another run is shown
    scored.textContent = ended ? "Scored now, with interventions left out: tokens have probabilities to inspect and to color by." : "";
    if (!ended) return;
    strip.set(strip.tokens.map((token, i) => ({ ...token, logprob: tokens[i]?.logprob, top: tokens[i]?.top })));
    pins.restore();
    recolour();
  }

  return {
    element,
    ready: async () => {
      if (loaded) return null;
      loaded = true;
      const wanted = [run, other];
      return (await list()) && wanted[0] ? openRun(...wanted) : null;
    },
    read: () => ({ session, run, other, colour, ...pins.read(), filters: Object.fromEntries(Object.entries(filters).map(([name, input]) => [name, input.value])) }),
    write: (state) => {
      for (const one of [reading, scoring, previewing]) one.end();
      for (const [name, input] of Object.entries(filters)) input.value = asText(state.filters?.[name]);
      colour = state.colour ?? {};
      pins.write(state);
      [session, run, other] = [state.session, state.run, state.other].map((one) => asText(one));
      loaded = false;
    },
  };
}

const tagsOf = ({ tags }) => visible(Object.entries(tags).map(([name, value]) => `${name}=${value}`).join(", "));
const time = (unix) => new Date(unix * 1000).toLocaleString();
const size = (count) => (count < 1e6 ? `${number(count / 1e3)} kB` : count < 1e9 ? `${number(count / 1e6)} MB` : `${number(count / 1e9)} GB`);

/** A button that downloads the files of a session, or the one that has a run, and its Stop; errors are shown in `trouble`. */
function downloads(session, run, trouble) {
  const start = button("Download", async () => {
    await loading.run(async (signal) => {
      const files = await filesOf(session, run, signal);
      for (const [i, [name, file]] of files.entries()) {
        const progress = (have, whole) => (start.textContent = `${Math.round((100 * (i + have / whole)) / files.length)}%`);
        const link = h("a", { href: URL.createObjectURL(await bytes(...file, { signal, progress })), download: name });
        link.click();
        setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
      }
    });
    start.textContent = "Download";
  });
  const loading = work({ trouble, starts: start, what: "the download" });
  return [start, loading.stop];
}

/** The files that have a session's runs, or one of them: each one's name, and what `bytes` needs for it. */
async function filesOf(session, run, signal) {
  const found = new Map();
  for (let after = ""; ; ) {
    const { data, has_more: more } = await get("v1/activations/runs", { session, run, limit: 1000, after }, signal);
    for (const one of data) found.set(`${one.owner ?? ""}/${one.file}`, [one.file, fileOf(one)]);
    if (!more) return [...found.values()];
    after = data.at(-1).run_id;
  }
}
