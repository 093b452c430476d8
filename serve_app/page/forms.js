// Forms that several views have: sampling settings, and a text with the answer that follows it.

import { check, choose, errorNote, field, fill, h } from "./dom.js";
import { vectors } from "./recompute.js";
import { asBool, asIds, asNumber, asText } from "./state.js";

const numeric = (value, props) => h("input", { type: "number", value: value ?? "", ...props });
const given = (input) => (input.value === "" || !input.validity.valid ? undefined : input.valueAsNumber);

/** Sampling settings; `read()` gives a request's fields, `write(state)` puts them in. */
export function sampling({ max = 200 } = {}) {
  const inputs = {
    max_tokens: numeric(max, { min: 0, max: 100000 }),
    temperature: numeric(0.7, { min: 0, max: 2, step: 0.05 }),
    top_p: numeric(1, { min: 0, max: 1, step: 0.01 }),
    seed: numeric(0, { min: 0, max: 2 ** 53 - 1 }),
  };
  const fields = [
    field("Most new tokens", inputs.max_tokens),
    field("Temperature", inputs.temperature, "0 takes the likeliest token"),
    field("Top p", inputs.top_p),
    field("Seed", inputs.seed, "the same seed repeats the answer"),
  ];
  return {
    element: h("div", { class: "fields" }, ...fields),
    read: () => Object.fromEntries(Object.entries(inputs).map(([name, input]) => [name, given(input)])),
    write: (state = {}) => {
      for (const [name, input] of Object.entries(inputs)) input.value = asNumber(state?.[name], input.value);
    },
  };
}

/**
 * A text to look into: typed, as it stands or as a chat's message, with an answer behind it; or token ids of another
 * view. `read()` gives `{ text, chat, ids, count, ...sampling }`; with `ids` the text is only shown. `asked()` gives the
 * same, with the example as the text where none was typed.
 */
export function source({ text, label = "Text", max = 24, answers = true, onchange = () => {} }) {
  const box = h("textarea", { rows: 2, spellcheck: false, placeholder: text });
  const [asChat, chatLabel] = check("as a chat message, by the model's template");
  const settings = sampling({ max });
  settings.write({ temperature: 0 });
  const from = h("p", { class: "from" });
  let ids = null;
  let count = 0;
  const said = () => {
    from.textContent = ids ? `The ${ids.length} tokens of another view. A text typed here takes their place.` : "";
    box.placeholder = ids ? "" : text;
  };
  box.addEventListener("input", () => {
    ids = null;
    said();
  });
  const element = h(
    "div",
    { class: "source" },
    field(label, box),
    from,
    chatLabel,
    answers ? h("details", {}, h("summary", {}, "Answer and sampling"), settings.element) : null,
  );
  element.addEventListener("input", onchange);
  const read = () => ({ text: box.value, chat: asChat.checked, ...(ids ? { ids, count } : {}), ...settings.read() });
  return {
    element,
    read,
    asked: () => {
      if (!ids && !box.value) box.value = text;
      return read();
    },
    write: (state) => {
      box.value = asText(state.text);
      asChat.checked = asBool(state.chat, false);
      ids = asIds(state.ids);
      count = Math.min(asNumber(state.count, 0), ids?.length ?? 0);
      settings.write(state);
      said();
    },
  };
}

/** Puts the tensors that were sent to the server into a select. */
export async function fillTensors(select) {
  const found = await vectors();
  fill(select, found.length ? found.map(([id, name, shape]) => [id, `${name} [${shape.join(", ")}] ${id}`]) : [["", "none is stored"]]);
}

/** A choice of a layer, or of all. */
export function layers(withAll) {
  const select = choose([]);
  return {
    element: select,
    set: (count, first) => {
      const chosen = select.value;
      const numbers = Array.from({ length: count }, (_, i) => [String(i), `layer ${i}`]);
      select.replaceChildren(...[...(withAll ? [["all", "all layers"]] : []), ...numbers].map(([value, name]) => h("option", { value }, name)));
      const wanted = [chosen, first, String(Math.floor(count / 2))].find((one) => one !== undefined && one !== "" && [...select.options].some(({ value }) => value === String(one)));
      select.value = wanted ?? "";
    },
    /** Offer the layers of the served model, once it is known; what goes wrong is said in `trouble`. */
    know: async function (app, trouble) {
      if (!app.model()) return;
      try {
        this.set((await app.structure()).layers);
      } catch (error) {
        if (error.status !== 401) trouble.replaceChildren(errorNote(error));
      }
    },
  };
}
