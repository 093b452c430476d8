// Shared forms: sampling settings, and a text with its answer.

import { get } from "./api.js";
import { check, choose, errorNote, field, fill, h } from "./dom.js";
import { asBool, asIds, asNumber, asText } from "./state.js";

const numeric = (value, props) => h("input", { type: "number", value: value ?? "", ...props });
const given = (input) => (Number.isNaN(input.valueAsNumber) ? undefined : input.valueAsNumber);

/** Sampling settings: `read()` returns their values, `asked()` the request fields; it throws if one is out of range. */
export function sampling({ max = 200 } = {}) {
  const inputs = {
    max_tokens: numeric(max, { min: 0, max: 100000 }),
    temperature: numeric(0.7, { min: 0, max: 2, step: "any" }),
    top_p: numeric(1, { min: 0, max: 1, step: "any" }),
    seed: numeric(0, { min: 0, max: 2 ** 53 - 1 }),
  };
  const fields = [
    field("Max new tokens", inputs.max_tokens),
    field("Temperature", inputs.temperature, "0 selects the most likely token"),
    field("Top p", inputs.top_p),
    field("Seed", inputs.seed, "the same seed repeats the response"),
  ];
  const read = () => Object.fromEntries(Object.entries(inputs).map(([name, input]) => [name, given(input)]));
  return {
    element: h("div", { class: "fields" }, ...fields),
    read,
    asked: () => {
      const wrong = Object.values(inputs).find(({ validity }) => !validity.valid);
      if (!wrong) return read();
      wrong.closest("details").open = true;
      wrong.focus();
      throw new Error(`${wrong.labels[0].textContent}: ${wrong.validationMessage}`);
    },
    write: (state = {}) => {
      for (const [name, input] of Object.entries(inputs)) input.value = asNumber(state?.[name], input.value);
    },
  };
}

/**
 * A text to analyse: typed, as plain text or as a chat's message, with an answer after it; or token ids of another
 * view. `read()` returns `{ text, chat, ids, count, model, ...sampling }`; with `ids` of that model, the text is only
 * shown. `asked(model)` returns the same for a request, with the example as the text if none was typed.
 */
export function source({ text, label = "Text", max = 24, onchange = () => {} }) {
  const box = h("textarea", { rows: 2, spellcheck: false, placeholder: text });
  const [asChat, chatLabel] = check("as a chat message, by the model's template");
  const settings = sampling({ max });
  settings.write({ temperature: 0 });
  const from = h("p", { class: "from" });
  let ids = null;
  let count = 0;
  let its = ""; // the model of these tokens
  const said = () => {
    from.textContent = ids ? `The ${ids.length} tokens of another view. A text typed here takes their place.` : "";
    box.placeholder = ids ? "" : text;
  };
  box.addEventListener("input", () => {
    ids = null;
    said();
  });
  const element = h("div", {}, field(label, box), from, chatLabel, h("details", {}, h("summary", {}, "Length and sampling"), settings.element));
  element.addEventListener("input", onchange);
  const read = () => ({ text: box.value, chat: asChat.checked, ...(ids ? { ids, count, model: its } : {}), ...settings.read() });
  return {
    element,
    read,
    sampled: settings.asked,
    asked: (model) => {
      if (ids && its && its !== model) throw new Error(`These tokens are those of the model ${its}: choose it, or type a text.`);
      if (!ids && !box.value) box.value = text;
      return { ...read(), ...settings.asked() };
    },
    write: (state) => {
      box.value = asText(state.text);
      asChat.checked = asBool(state.chat, false);
      ids = asIds(state.ids);
      count = Math.min(asNumber(state.count, 0), ids?.length ?? 0);
      its = asText(state.model);
      settings.write(state);
      said();
    },
  };
}

/** Lists the uploaded tensors in a select. */
export async function fillTensors(select) {
  const { data } = await get("v1/tensors", { limit: 1000 });
  const found = data.flatMap(({ id, tensors }) =>
    Object.entries(tensors).map(([name, { shape }]) => [Object.keys(tensors).length > 1 ? `${id}/${name}` : id, `${name} [${shape.join(", ")}] ${id}`]),
  );
  fill(select, found.length ? found : [["", "none is stored"]]);
}

/** A choice of one layer, at first the middle one, or of all. */
export function layers(withAll) {
  const select = choose([]);
  let said = null; // the error of requesting the layers
  const set = (count) => {
    const numbers = Array.from({ length: count }, (_, i) => [String(i), `layer ${i}`]);
    const isKept = fill(select, [...(withAll ? [["all", "all layers"]] : []), ...numbers]);
    if (!isKept) select.value = String(Math.floor(count / 2));
  };
  return {
    element: select,
    set,
    /** Offers the layers of the served model once they are known; errors are shown in `trouble`. */
    know: async (app, trouble) => {
      const model = app.model();
      if (!model) return;
      said?.remove();
      try {
        const { layers: count } = await app.structure(model);
        if (model === app.model()) set(count);
      } catch (error) {
        if (error.status === 401 || model !== app.model()) return;
        said?.remove();
        trouble.append((said = errorNote(error)));
      }
    },
  };
}
