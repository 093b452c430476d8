// Chat: a conversation whose answers are strips of tokens.

import { isAbort, stream } from "./api.js";
import { colouring } from "./colouring.js";
import { button, check, empty, errorNote, field, h } from "./dom.js";
import { sampling } from "./forms.js";
import { asBool, asText } from "./state.js";
import { details, onLook, pinning } from "./tokens.js";
import "./code.js";

const LIKELIEST = 20; // tokens beside each, of which a chat may ask for so many

export function view(app) {
  const turns = []; // { role, content, element, strip?, answer? }
  let running = null;
  const pins = pinning(app.changed); // of the last answer: a link holds the others as texts alone
  const log = h("div", { class: "log" });
  const box = h("textarea", { id: "prompt", rows: 3, placeholder: "Ask the model something" });
  const system = h("input", { spellcheck: false });
  const settings = sampling();
  const [records, recordsLabel] = check("Store activations with the answer");
  const points = h("input", { value: "layers.*.output", spellcheck: false });
  const session = h("input", { placeholder: "the day's", spellcheck: false });
  const storing = [field("Points", points, "apart by commas"), field("Session", session)];
  const send = h("button", { class: "main" }, "Send");
  const stop = button("Stop", () => running?.abort(), { hidden: true });
  const trouble = h("div");
  const about = h("aside", { "aria-label": "Token" }, ...details());
  const code = document.createElement("request-code");
  const said = h("p", { class: "hidden", role: "status" });
  const colours = colouring(app, { code, onchange: () => (recolour(), app.changed()) });
  const form = h(
    "form",
    { class: "composer", noValidate: true, onsubmit: (event) => (event.preventDefault(), submit()) },
    field("Message", box),
    h("div", { class: "row" }, send, stop, button("New chat", renew), recordsLabel),
  );
  const more = h("details", {}, h("summary", {}, "Settings"), field("System message", system), settings.element, h("div", { class: "fields" }, ...storing));
  const element = h(
    "div",
    { class: "split" },
    h("section", { "aria-label": "Chat" }, colours.element, log, trouble, form, more, code, said),
    about,
  );

  box.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    submit();
  });
  records.addEventListener("change", arrange);
  element.addEventListener("input", app.changed);
  arrange();
  welcome();

  function arrange() {
    for (const one of storing) one.hidden = !records.checked;
    if (records.checked) more.open = true;
  }

  function welcome() {
    if (!turns.length) log.replaceChildren(empty("Write to the model. Each token of its answer shows how sure it was, and what else it might have said."));
  }

  function clear() {
    running?.abort();
    drop(0);
    about.replaceChildren(...details());
  }

  function renew() {
    clear();
    pins.write();
    trouble.replaceChildren();
    welcome();
    app.changed();
    box.focus();
  }

  function addTurn(turn) {
    if (!turns.length) log.replaceChildren();
    turns.push(turn);
    turn.element = h("article", { class: turn.role, "aria-label": turn.role === "user" ? "You" : "Model" });
    if (turn.role === "user" || turn.content) turn.element.append(h("div", { class: "said", dir: "auto" }, turn.content));
    log.append(turn.element);
    return turn;
  }

  function drop(from) {
    for (const turn of turns.splice(from)) {
      turn.element.remove();
      if (turn.strip) colours.forget(turn.strip);
    }
  }

  async function submit() {
    const text = box.value;
    if (running || !text.trim()) return box.focus();
    pins.write();
    const asked = addTurn({ role: "user", content: text });
    box.value = "";
    if (!(await answer()) && turns.at(-1) === asked) {
      // What was typed is not lost: it stands in the box again.
      drop(turns.length - 1);
      const last = turns.at(-1)?.strip;
      pins.watch(last ? [last] : []);
      pins.write({ pinned: [last?.pinned] });
      if (!box.value) box.value = text;
      welcome();
    }
    return app.changed();
  }

  function body() {
    const { max_tokens, ...rest } = settings.read();
    const before = system.value ? [{ role: "system", content: system.value }] : [];
    const capture = { points: points.value.split(",").map((one) => one.trim()).filter(Boolean), store_text: true };
    return {
      model: app.model(),
      messages: [...before, ...turns.map(({ role, content }) => ({ role, content }))],
      max_completion_tokens: max_tokens,
      ...rest,
      logprobs: true,
      top_logprobs: LIKELIEST,
      return_token_ids: true,
      ...(colours.asked().length ? { readouts: colours.asked() } : {}),
      ...(records.checked ? { capture, ...(session.value ? { session_id: session.value } : {}) } : {}),
    };
  }

  /** Asks for the answer to what stands in the log; gives whether any of it came. */
  async function answer() {
    const asked = body();
    code.note("Chat", { method: "POST", path: "v1/chat/completions", body: asked });
    const turn = addTurn({ role: "assistant", content: "" });
    const strip = document.createElement("token-strip");
    strip.setAttribute("aria-label", "Tokens of the answer");
    turn.strip = strip;
    turn.answer = { ids: [], offset: 0, comes: colours.asked()[0] };
    colours.follow([[strip, turn.answer]]);
    pins.watch([strip]);
    const thinks = h("p", { class: "wait" }, "Waiting for the model…");
    turn.element.append(thinks, strip);
    onLook(strip, (index) => look(turn, index));
    begin();
    trouble.replaceChildren();
    try {
      await take(asked, turn, () => thinks.remove());
    } catch (error) {
      const isAsked = () => turns.at(-1)?.strip === strip || turns.at(-1)?.role === "user"; // else it is in the box again
      if (!isAbort(error)) trouble.replaceChildren(errorNote(error, () => (isAsked() ? again() : submit())));
    } finally {
      thinks.remove();
      end();
    }
    if (!turns.includes(turn)) return true; // another chat has taken its place
    if (!strip.tokens.length && !turn.ended) {
      if (turns.at(-1) === turn) drop(turns.length - 1);
      return false;
    }
    finish(turn);
    return true;
  }

  async function take(asked, turn, begun) {
    for await (const event of stream("v1/chat/completions", asked, running.signal)) {
      if (event.prompt_token_ids) {
        turn.answer.ids = [...event.prompt_token_ids];
        turn.answer.offset = event.prompt_token_ids.length;
      }
      for (const { delta, logprobs, token_ids: ids = [], readouts, finish_reason: reason } of event.choices) {
        turn.content += delta.content ?? "";
        const tokens = (logprobs?.content ?? []).map(({ token, logprob, top_logprobs: top }, i) => ({
          text: token,
          id: ids[i],
          logprob,
          top: top.map((one) => ({ text: one.token, logprob: one.logprob })),
        }));
        turn.answer.ids.push(...ids);
        if (tokens.length) begun();
        turn.strip.add(tokens);
        if (readouts) colours.arrived(turn.strip, turn.answer, readouts);
        if (delta.run_id) turn.run = { run_id: delta.run_id, session_id: delta.session_id };
        if (reason) turn.ended = reason;
      }
      if (event.activations_meta?.status === "failed") {
        turn.run = null;
        trouble.replaceChildren(errorNote(new Error(`The activations were not stored: ${event.activations_meta.reason}`)));
      }
    }
  }

  function begin() {
    running = new AbortController();
    send.disabled = true;
    stop.hidden = false;
  }

  function end() {
    running = null;
    send.disabled = false;
    stop.hidden = true;
  }

  /** What can be done with an answer, once it is there. */
  function finish(turn) {
    const { ids, offset } = turn.answer;
    const count = turn.strip.tokens.length;
    const why = { length: "the limit of new tokens", stop: "the end of its answer" }[turn.ended] ?? "where it was stopped";
    said.textContent = `${count} tokens, up to ${why}.`;
    const into = (name, title) => button(title, () => app.open(name, { ids, count: offset }, offset + Math.max(turn.strip.pinned, 0)));
    turn.element.append(
      h(
        "p",
        { class: "row under" },
        h("span", {}, said.textContent),
        ids.length ? into("lens", "Lens grid") : null,
        ids.length ? into("attention", "Attention") : null,
        turn.run ? button("Stored run", () => app.open("runs", { session: turn.run.session_id, run: turn.run.run_id })) : null,
        button("Answer again", again, { class: "again" }),
      ),
    );
    pins.restore();
    colour(turn);
  }

  /** Asks for the last answer once more. */
  async function again() {
    if (running) return;
    if (turns.at(-1)?.role === "assistant") drop(turns.length - 1);
    if (turns.at(-1)?.role === "user") await answer();
    else await submit();
    app.changed();
  }

  const textOf = (turn) => {
    const has = turn.run && points.value.includes(colours.read().point);
    return { ...turn.answer, run: has ? turn.run : null };
  };

  async function colour(turn) {
    await colours.apply(turn.strip, textOf(turn));
    if (turn.strip.pinned >= 0) look(turn, turn.strip.pinned);
  }

  function recolour() {
    colours.prepare();
    const last = turns.at(-1);
    const follows = running && last?.strip && colours.follow([[last.strip, last.answer]]);
    for (const turn of turns) if (turn.strip && !(follows && turn === last)) colour(turn);
  }

  function look(turn, index) {
    const { strip, answer: of } = turn;
    about.replaceChildren(...details(strip.tokens[index], of.offset + index, colours.scores(strip, index, of)));
  }

  return {
    element,
    ready: colours.prepare,
    read: () => ({
      messages: turns.map(({ role, content }) => ({ role, content })),
      draft: box.value,
      system: system.value,
      ...settings.read(),
      record: records.checked,
      points: points.value,
      session: session.value,
      colour: colours.read(),
      ...pins.read(),
    }),
    write: (state) => {
      pins.write(state);
      clear();
      box.value = asText(state.draft);
      system.value = asText(state.system);
      settings.write(state);
      records.checked = asBool(state.record, false);
      points.value = asText(state.points, points.value);
      session.value = asText(state.session);
      colours.write(state.colour);
      const messages = Array.isArray(state.messages) ? state.messages : [];
      for (const one of messages) {
        if (["user", "assistant"].includes(one?.role) && typeof one.content === "string") addTurn({ role: one.role, content: one.content });
      }
      // A link never has the model work by itself: whoever opens it asks.
      if (turns.length) {
        const told = "This chat comes from a link, without its tokens.";
        turns.at(-1).element.append(h("p", { class: "row under" }, h("span", {}, told), button("Answer again", again, { class: "again" })));
      }
      arrange();
      welcome();
    },
  };
}
