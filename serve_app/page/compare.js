// Two stored runs, token by token, and how far their activations lie apart.

import { choose, errorNote, field, h, number, visible } from "./dom.js";
import { storedRows } from "./recompute.js";
import { legend, paint, scale } from "./scales.js";
import { dot, norm } from "./tensors.js";

/** What is shown of two runs, each as `runs.js` reads one. */
export function comparison(app, one, two) {
  const shared = one.names.filter((name) => two.names.includes(name) && !name.endsWith(".attention.weights"));
  const last = Math.max(one.positions.at(-1) ?? 0, two.positions.at(-1) ?? 0);
  const cells = [];
  let same = 0;
  for (let position = 0; position <= last; position++) {
    const [a, b] = [one, two].map((of) => of.tokens[of.positions.indexOf(position)]);
    if (!a && !b) continue;
    const differs = a?.id !== b?.id;
    same += !differs;
    const said = `token ${position}: ${differs ? "differs" : "the same"}`;
    const texts = [a, b].map((token) => h("span", {}, token ? visible(token.text) : "–"));
    cells.push({ position, element: h("li", { class: differs ? "differs" : null, title: said }, ...texts, differs ? h("span", { class: "hidden" }, "differs") : null) });
  }
  const point = choose([["", "tokens alone"], ...shared.map((name) => [name])]);
  const key = h("div");
  const trouble = h("div", { role: "status" });
  point.addEventListener("change", colour);

  async function colour() {
    trouble.replaceChildren();
    key.replaceChildren();
    for (const { element } of cells) paint(element, null);
    if (!point.value) return;
    try {
      const [a, b] = await Promise.all([one, two].map(({ facts }) => storedRows(facts, point.value)));
      const of = scale({ title: `1 – cosine at ${point.value}`, high: 1 });
      key.replaceChildren(legend(of));
      for (const { position, element } of cells) {
        const [x, y] = [a, b].map(({ rows, positions }) => rows[positions.indexOf(position)]);
        if (!x || !y || x.length !== y.length) continue;
        const apart = 1 - dot(x, y) / (norm(x) * norm(y));
        paint(element, of.colour(apart));
        element.title = `token ${position}: 1 – cosine ${number(apart)}`;
      }
    } catch (error) {
      trouble.replaceChildren(errorNote(error, colour));
    }
  }

  return [
    h("h2", {}, "Two runs, token by token"),
    h("p", { class: "from" }, `Above ${one.facts.run_id}, below ${two.facts.run_id}. ${same} of ${cells.length} tokens are the same; those that differ are underlined.`),
    h("div", { class: "row" }, field("How far apart at", point), key, trouble),
    h("ol", { class: "pairs", "aria-label": "Tokens of both runs" }, ...cells.map(({ element }) => element)),
  ];
}
