// Two stored runs, token by token, and the distance of their activations.

import { choose, field, h, visible } from "./dom.js";
import { storedRows } from "./recompute.js";
import { legend, paint, scale } from "./scales.js";
import { dot, norm } from "./tensors.js";
import { work } from "./work.js";

/** Shows two runs in `place`, each as read by `runs.js`. */
export function comparison(place, one, two) {
  const shared = one.names.filter((name) => two.names.includes(name) && !name.endsWith(".attention.weights"));
  const last = Math.max(one.positions.at(-1) ?? 0, two.positions.at(-1) ?? 0);
  const cells = [];
  let same = 0;
  for (let position = 0; position <= last; position++) {
    const [a, b] = [one, two].map((of) => of.tokens[of.positions.indexOf(position)]);
    if (!a && !b) continue;
    const differs = a?.id !== b?.id;
    same += !differs;
    const texts = [a, b].map((token) => h("span", {}, token ? visible(token.text) : "–"));
    const said = h("span", { class: "hidden" });
    const value = h("small", { "aria-hidden": "true" });
    cells.push({ position, differs, said, value, element: h("li", { class: differs ? "differs" : null }, ...texts, said, value) });
  }
  const point = choose([["", "tokens alone"], ...shared.map((name) => [name])]);
  const key = h("div");
  const trouble = h("div", { role: "status" });
  let apart = new Map(); // the distance of the two rows at each position
  point.addEventListener("change", measure);

  const measuring = work({ trouble, home: () => point });

  function measure() {
    measuring.end();
    trouble.replaceChildren();
    apart = new Map();
    draw();
    if (!point.value) return;
    measuring.run(async (signal) => {
      const [a, b] = await Promise.all([one, two].map(({ facts }) => storedRows(facts, point.value, signal)));
      for (const { position } of cells) {
        const [x, y] = [a, b].map(({ rows, positions }) => rows[positions.indexOf(position)]);
        if (x && y && x.length === y.length) apart.set(position, Math.max(1 - dot(x, y) / (norm(x) * norm(y)), 0));
      }
      draw();
    });
  }

  function draw() {
    const of = scale({ title: `1 – cosine at ${point.value}`, high: 1 });
    key.replaceChildren(apart.size ? legend(of) : "");
    for (const { position, differs, element, said, value } of cells) {
      const far = apart.get(position);
      paint(element, far === undefined ? null : of.colour(far));
      element.title = `token ${position}: ${differs ? "differs" : "the same"}${far === undefined ? "" : `, 1 – cosine ${far.toFixed(3)}`}`;
      said.textContent = element.title;
      value.textContent = far === undefined ? "" : far.toFixed(2).replace(/^0/, "");
    }
  }

  draw();
  place.replaceChildren(
    h("h2", {}, "Two runs, token by token"),
    h("p", { class: "from" }, `Above ${one.facts.run_id}, below ${two.facts.run_id}. ${same} of ${cells.length} tokens are the same; those that differ are underlined.`),
    h("div", { class: "row" }, field("How far apart at", point), measuring.stop, key, trouble),
    h("ol", { class: "pairs", "aria-label": "Tokens of both runs" }, ...cells.map(({ element }) => element)),
  );
}
