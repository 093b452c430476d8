// The requests of a view as code to run elsewhere. A key is named, never shown.

import { address, key } from "./api.js";
import { button, copy, h } from "./dom.js";

/** A value as a Python literal. */
export function python(value, indent = "") {
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (typeof value === "number") return String(value);
  if (typeof value === "string") return json(value);
  const inner = `${indent}    `;
  if (Array.isArray(value)) {
    if (value.every((one) => typeof one !== "object" || one === null)) return `[${value.map((one) => python(one)).join(", ")}]`;
    return `[\n${value.map((one) => inner + python(one, inner)).join(",\n")},\n${indent}]`;
  }
  const pairs = Object.entries(value).filter(([, one]) => one !== undefined);
  return pairs.length ? `{\n${pairs.map(([name, one]) => `${inner}${python(name)}: ${python(one, inner)}`).join(",\n")},\n${indent}}` : "{}";
}

const HIDDEN = /[\u007f-\u009f\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]/g; // they would change how the code looks
const escaped = (one) => `\\u${one.charCodeAt(0).toString(16).padStart(4, "0")}`;
const json = (value) => JSON.stringify(value).replace(HIDDEN, escaped);

/** A request as a Python program with httpx. */
export function asPython({ method, path, query, body }) {
  const lines = ["import httpx", ""];
  const given = [`"${address(path)}"`];
  if (query) given.push(`params=${python(query)}`);
  if (key.get()) {
    lines.unshift("import os", "");
    given.push('headers={"Authorization": f"Bearer {os.environ[\'VITRINE_API_KEY\']}"}');
  }
  if (body) {
    lines.push(`body = ${python(body)}`);
    given.push("json=body");
  }
  lines.push(`response = httpx.${method.toLowerCase()}(${[...given, "timeout=600"].join(", ")})`, "print(response.json())");
  return lines.join("\n");
}

const shell = (text) => `'${text.replace(/'/g, "'\\''")}'`;

/** A request as a shell command. */
export function asCurl({ method, path, query, body }) {
  const parts = [`curl -s ${method === "GET" || method === "POST" ? "" : `-X ${method} `}${shell(String(address(path, query)))}`];
  if (key.get()) parts.push('-H "Authorization: Bearer $VITRINE_API_KEY"');
  if (body) parts.push("-H 'Content-Type: application/json'", `-d ${shell(json(body))}`);
  return parts.join(" \\\n  ");
}

/** `<request-code>`: the last requests of a view by name. Code is generated while it is shown. */
class RequestCode extends HTMLElement {
  #sections = new Map(); // name -> `{ request, make, write() }`
  #none = h("p", { class: "empty" }, "No request yet.");
  #all = h("details", { ontoggle: () => this.#sections.forEach((one) => one.write()) }, h("summary", {}, "The requests as Python and curl"), this.#none);

  connectedCallback() {
    this.append(this.#all);
  }

  /** Stores a request under a name, replacing an earlier one. */
  note(name, request) {
    this.#none.remove();
    if (!this.#sections.has(name)) this.#sections.set(name, this.#section(name));
    const one = this.#sections.get(name);
    one.request = request;
    one.write();
  }

  #section(name) {
    const text = h("pre", { tabIndex: 0, role: "region", "aria-label": `${name}, as code` });
    const one = { request: null, make: asPython };
    one.write = () => {
      if (!this.#all.open) return;
      text.textContent = one.make(one.request);
      for (const [form, make] of forms) form.setAttribute("aria-pressed", String(make === one.make));
    };
    const forms = [["as Python", asPython], ["as curl", asCurl]].map(([title, make]) => [button(title, () => ((one.make = make), one.write())), make]);
    const copies = button("Copy", () => copy(text.textContent, copies));
    this.#all.append(h("section", {}, h("div", { class: "row" }, h("strong", {}, name), ...forms.map(([form]) => form), copies), text));
    return one;
  }
}

customElements.define("request-code", RequestCode);
