// Chat: a conversation whose answers are strips of tokens.

import { stream } from "./api.js";
import { colouring } from "./colouring.js";
import { button, check, empty, errorNote, field, h, keepingFocus } from "./dom.js";
import { sampling } from "./forms.js";
import { asBool, asText } from "./state.js";
import { asPlain, details, onLook, pinning, tokenPane } from "./tokens.js";
import { work } from "./work.js";
import "./code.js";

const LIKELIEST = 20; // top tokens for each token, the most that a chat may request

export function view(app) {
  const turns = []; // { role, content, element, strip?, answer? }
  const pins = pinning(app.changed); // of the last answer: a link has only the texts of the others
  const log = h("div", { class: "log" });
  const box = h("textarea", { id: "prompt", rows: 3, placeholder: "Ask the model something" });
  const system = h("input", { spellcheck: false });
  const settings = sampling();
  const [records, recordsLabel] = check("Store activations with the response");
  const points = h("input", { value: "layers.*.output", spellcheck: false });
  const session = h("input", { placeholder: "the day's", spellcheck: false });
  const storing = [field("Points", points, "apart by commas"), field("Session", session)];
  const send = h("button", { class: "main" }, "Send");
  const trouble = h("div");
  const asking = work({ trouble, starts: send, home: () => box });
  const about = tokenPane();
  const code = document.createElement("request-code");
  const said = h("p", { class: "hidden", role: "status" });
  const colours = colouring(app, { code, onchange: () => (recolour(), app.changed()) });
  const form = h(
    "form",
    { class: "composer", noValidate: true, onsubmit: (event) => (event.preventDefault(), submit()) },
    field("Message", box),
    h("div", { class: "row" }, send, asking.stop, button("New chat", renew), recordsLabel),
  );
  const more = h("details", {}, h("summary", {}, "Settings"), field("System message", system), settings.element, h("div", { class: "fields" }, ...storing));
  const element = h("div", { class: "split" }, h("section", { "aria-label": "Chat" }, colours.element, log, trouble, form, more, code, said), about.element);

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
    if (!turns.length) log.replaceChildren(empty("Write to the model. Each token of the response shows its probability and the most likely alternatives."));
  }

  function clear() {
    asking.end();
    drop(0);
    about.show();
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
    if (asking.isRunning() || !text.trim()) return box.focus();
    pins.write();
    const asked = addTurn({ role: "user", content: text });
    box.value = "";
    if (!(await answer(submit)) && turns.at(-1) === asked) {
      // The typed text is not lost: it is put back into the box.
      drop(turns.length - 1);
      const last = turns.at(-1)?.strip;
      pins.watch(last ? [last] : []);
      pins.write({ pinned: [last?.pinned] });
      if (!box.value) box.value = text;
      welcome();
    }
    return app.changed();
  }

  /** The request for the answer to the log, replacing an existing answer. */
  function body() {
    const { max_tokens, ...rest } = settings.asked();
    const before = system.value ? [{ role: "system", content: system.value }] : [];
    const capture = { points: points.value.split(",").map((one) => one.trim()).filter(Boolean), store_text: true };
    const upTo = turns.at(-1)?.role === "assistant" ? turns.slice(0, -1) : turns;
    return {
      model: app.model(),
      messages: [...before, ...upTo.map(({ role, content }) => ({ role, content }))],
      max_completion_tokens: max_tokens,
      ...rest,
      logprobs: true,
      top_logprobs: LIKELIEST,
      return_token_ids: true,
      ...(colours.asked().length ? { readouts: colours.asked() } : {}),
      ...(records.checked ? { capture, ...(session.value ? { session_id: session.value } : {}) } : {}),
    };
  }

  /** Requests that answer; returns whether any part of it arrived. */
  async function answer(retry) {
    let turn = null;
    await asking.run(
      async (signal) => {
        const asked = body();
        code.note("Chat", { method: "POST", path: "v1/chat/completions", body: asked });
        if (turns.at(-1)?.role === "assistant") drop(turns.length - 1);
        turn = addTurn({ role: "assistant", content: "" });
        const strip = document.createElement("token-strip");
        strip.setAttribute("aria-label", "Tokens of the response");
        turn.strip = strip;
        turn.answer = { model: asked.model, ids: [], offset: 0, comes: colours.asked()[0] };
        colours.follow([[strip, turn.answer]]);
        pins.watch([strip]);
        const thinks = h("p", { class: "wait" }, "Waiting for the model…");
        turn.element.append(thinks, strip);
        onLook(strip, (index) => look(turn, index));
        try {
          await take(asked, turn, signal, () => thinks.remove());
        } finally {
          thinks.remove();
        }
      },
      () => (turns.at(-1) === turn || turns.at(-1)?.role === "user" ? again() : retry()),
    );
    if (!turn) return false;
    if (!turns.includes(turn)) return true; // another chat has replaced it
    if (!turn.strip.tokens.length && !turn.ended) {
      if (turns.at(-1) === turn) drop(turns.length - 1);
      return false;
    }
    finish(turn);
    return true;
  }

  async function take(asked, turn, signal, begun) {
    for await (const event of stream("v1/chat/completions", asked, signal)) {
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
        turn.strip.add(tokens, delta.content ?? "");
        if (readouts) colours.arrived(turn.strip, turn.answer, readouts);
        if (delta.run_id) turn.answer.run = { run_id: delta.run_id, session_id: delta.session_id };
        if (reason) turn.ended = reason;
      }
      const stored = event.activations_meta;
      if (stored?.status === "stored") turn.answer.run = { session_id: stored.session_id, ...stored.runs[0] };
      if (stored?.status === "failed") {
        turn.answer.run = null;
        trouble.replaceChildren(errorNote(new Error(`The activations were not stored: ${stored.reason}`)));
      }
    }
  }

  /** The actions for a finished answer. */
  function finish(turn) {
    const { model, ids, offset, run } = turn.answer;
    const count = turn.strip.tokens.length;
    const why = { length: "the limit of new tokens", stop: "the end of its response" }[turn.ended] ?? "where it was stopped";
    said.textContent = `${count} tokens, up to ${why}.`;
    const into = (name, title) => button(title, () => app.open(name, { model, ids, count: offset }, offset + Math.max(turn.strip.pinned, 0)));
    const parts = [
      h("span", {}, said.textContent),
      ids.length ? into("lens", "Lens grid") : null,
      ids.length ? into("attention", "Attention") : null,
      run ? button("Stored run", () => app.open("runs", { session: run.session_id, run: run.run_id })) : null,
      button("Regenerate", again, { class: "again" }),
    ];
    turn.element.append(h("p", { class: "row under" }, ...parts), asPlain(turn.strip) ?? "");
    pins.restore();
    colour(turn);
  }

  /** Requests the last answer again. */
  async function again() {
    if (asking.isRunning()) return;
    const isAsked = turns.some(({ role }) => role === "user");
    await keepingFocus(isAsked ? () => answer(again) : submit, () => turns.at(-1)?.strip ?? box);
    app.changed();
  }

  async function colour(turn) {
    await colours.apply(turn.strip, turn.answer);
    if (turns.includes(turn) && turn.strip.pinned >= 0) look(turn, turn.strip.pinned);
  }

  function recolour() {
    colours.prepare();
    const last = turns.at(-1);
    const follows = asking.isRunning() && last?.strip && colours.follow([[last.strip, last.answer]]);
    for (const turn of turns) if (turn.strip && !(follows && turn === last)) colour(turn);
  }

  function look(turn, index) {
    const { strip, answer: of } = turn;
    about.show(...details(strip.tokens[index], of.offset + index, colours.scores(strip, index, of)));
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
      // A link never starts work of the model: its user starts it.
      if (turns.length) {
        const told = "This chat comes from a link, without its tokens.";
        turns.at(-1).element.append(h("p", { class: "row under" }, h("span", {}, told), button("Regenerate", again, { class: "again" })));
      }
      arrange();
      welcome();
    },
  };
}
