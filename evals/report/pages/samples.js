"use strict";
// Text of the model reaches the page by textContent alone.
(async () => {
  const PAGE = 50;
  const RULES = ["strict", "flexible", "normalized"];
  const HEADS = [
    ["id", "sample"], ["mode", "mode"], ["variant", "variant"], ["outcome", "outcome"], [document.body.dataset.rule, "answer"],
    ["gold", "gold"], ["reward", "reward", 3], ["completion_tokens", "tokens", 0], ["latency_s", "seconds", 2],
    ["turns", "turns", 0], ["tool_calls", "calls", 0], ["question", "question"],
  ];
  const MINOR = ["turns", "tool_calls", "reward"];
  const at = (id) => document.getElementById(id);
  const make = (tag, text, name) => {
    const element = document.createElement(tag);
    if (text !== undefined) element.textContent = text;
    if (name) element.className = name;
    return element;
  };

  const inflate = async (element) => {
    const bytes = Uint8Array.from(atob(element.textContent), (letter) => letter.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    return JSON.parse(await new Response(stream).text());
  };

  const samples = {};
  const load = async () => {
    for (const element of document.querySelectorAll('script[data-kind="table"]')) {
      const columns = await inflate(element);
      for (const name in columns) {
        samples[name] = samples[name] || [];
        for (const value of columns[name]) samples[name].push(value);
      }
      element.remove();
    }
  };
  const keyOf = (i) => `${samples.id[i]}.${samples.mode[i]}.${samples.variant[i]}${samples.epoch[i] > 1 ? `.${samples.epoch[i]}` : ""}`;

  let order = [], first = 0, sorted = null, down = false;
  const select = () => {
    const text = at("find").value.trim().toLowerCase();
    const equal = ["mode", "variant", "outcome"].map((name) => [samples[name], at(name).value]).filter(([, v]) => v);
    const searched = ["id", "question", "gold", ...RULES].map((name) => samples[name]);
    order = [];
    for (let i = 0; i < samples.id.length; i++) {
      if (!equal.every(([column, value]) => column[i] === value)) continue;
      if (text && !searched.some((column) => column[i] !== null && column[i].toLowerCase().includes(text))) continue;
      order.push(i);
    }
    if (sorted) {
      const column = samples[sorted], sign = down ? -1 : 1;
      order.sort((a, b) => {
        const x = column[a], y = column[b];
        if (x === null || y === null) return (x === null) - (y === null) || a - b;
        return (x < y ? -sign : x > y ? sign : 0) || a - b;
      });
    }
    first = 0;
    show();
  };

  const show = () => {
    at("rows").replaceChildren(...order.slice(first, first + PAGE).map(row));
    const many = order.length.toLocaleString("en"), last = Math.min(first + PAGE, order.length);
    at("said").textContent = order.length ? `${first + 1} to ${last} of ${many}` : "no sample fits";
    at("before").disabled = first === 0;
    at("after").disabled = last >= order.length;
  };

  const row = (i) => {
    const line = make("tr", undefined, "sample");
    for (const [name, , digits] of HEADS) {
      const value = samples[name][i];
      const cell = line.appendChild(make("td", undefined, digits === undefined ? name : `n ${name}`));
      if (name === "id") {
        const button = cell.appendChild(make("button", value, "open"));
        button.type = "button";
        button.setAttribute("aria-expanded", "false");
      } else if (name === "outcome") {
        cell.append(make("span", value.replace("_", " "), `badge kind-${value}`));
      } else if (value === null) {
        cell.textContent = "–";
      } else {
        cell.textContent = digits === undefined ? value : value.toFixed(digits);
      }
    }
    for (const name of MINOR) line.querySelector(`.${name}`).classList.add("minor");
    line.addEventListener("click", () => {
      if (!String(getSelection())) toggle(line, i);
    });
    return line;
  };

  const toggle = async (line, i) => {
    const button = line.querySelector("button");
    if (button.getAttribute("aria-expanded") === "true") {
      button.setAttribute("aria-expanded", "false");
      line.nextElementSibling.remove();
      return;
    }
    button.setAttribute("aria-expanded", "true");
    const opened = make("tr", undefined, "detail");
    const cell = opened.appendChild(make("td"));
    cell.colSpan = HEADS.length;
    const inner = cell.appendChild(make("div", undefined, "opened"));
    line.after(opened);
    history.replaceState(null, "", `#sample=${encodeURIComponent(keyOf(i))}`);
    await fill(inner, i);
  };

  const fill = async (inner, i) => {
    const key = keyOf(i), block = samples.block[i];
    if (block === null) {
      inner.append(make("p", "This trajectory is not in the page, which would be too large; it lies beside it:"));
    } else {
      const found = (await inflate(at(`steps-${block}`)))[key];
      facts(inner, found, i);
      for (const step of found.steps) inner.append(drawn(step));
      if (found.run_ids && found.run_ids.length) {
        inner.append(make("p", `activations: session ${found.session_id}, runs ${found.run_ids.join(", ")}`, "soft"));
      }
    }
    const files = inner.appendChild(make("p", undefined, "soft"));
    const names = [`trajectories/${key}.jsonl`, `samples/${key}.json`, `agent_states/${key}.json`];
    names.forEach((name, n) => {
      const link = make("a", name);
      link.href = name.split("/").map(encodeURIComponent).join("/");
      files.append(n ? ", " : "", link);
    });
  };

  const facts = (inner, found, i) => {
    const list = inner.appendChild(make("dl", undefined, "facts"));
    const say = (name, value) => {
      const one = list.appendChild(make("div"));
      one.append(make("dt", name), make("dd", value === null || value === undefined ? "–" : String(value)));
    };
    say("outcome", samples.outcome[i].replace("_", " "));
    say("gold", samples.gold[i]);
    for (const rule of RULES) say(rule, samples[rule][i]);
    say("finish", found.finish_reason);
    say("tokens, prompt and new", `${samples.prompt_tokens[i]} + ${samples.completion_tokens[i]}`);
    say("seconds", samples.latency_s[i]);
    for (const name in found.rewards) if (found.rewards[name] !== null) say(name, found.rewards[name].toFixed(3));
    if (found.error) inner.append(make("p", found.error, "warn"));
  };

  const drawn = (step) => {
    const part = make("article", undefined, `step ${step.error ? "bad" : ""}`);
    part.classList.add(["user", "assistant", "tool"].includes(step.role) ? step.role : "other");
    const head = part.appendChild(make("header"));
    head.append(make("b", step.role + (step.role === "tool" ? (step.error ? ": an error" : ": a result") : "")));
    const told = [];
    if (step.completion_tokens !== undefined) told.push(`${step.prompt_tokens} + ${step.completion_tokens} tokens`);
    if (step.latency_s !== undefined) told.push(`${step.latency_s.toFixed(2)} s`);
    if (step.finish_reason) told.push(`finish: ${step.finish_reason}`);
    if (told.length) head.append(" · " + told.join(" · "));
    if (step.reasoning_content) part.append(make("pre", step.reasoning_content, "soft"));
    if (step.content !== null && step.content !== undefined && step.content !== "") {
      part.append(make("pre", typeof step.content === "string" ? step.content : JSON.stringify(step.content, null, 2)));
    }
    for (const call of step.tool_calls || []) {
      part.append(make("pre", `${call.function.name}(${call.function.arguments})`));
    }
    return part;
  };

  const heads = () => {
    for (const [name, title, digits] of HEADS) {
      const head = at("heads").appendChild(make("th", undefined, digits === undefined ? "" : "n"));
      head.scope = "col";
      if (MINOR.includes(name)) head.classList.add("minor");
      const button = head.appendChild(make("button", title));
      button.type = "button";
      button.addEventListener("click", () => {
        down = sorted === name && !down;
        sorted = name;
        for (const other of at("heads").children) other.removeAttribute("aria-sort");
        head.setAttribute("aria-sort", down ? "descending" : "ascending");
        select();
      });
    }
  };

  const follow = async () => {
    const wanted = location.hash.startsWith("#sample=") && decodeURIComponent(location.hash.slice(8));
    if (!wanted) return;
    const place = order.findIndex((i) => keyOf(i) === wanted);
    if (place < 0) return;
    first = place - (place % PAGE);
    show();
    const line = at("rows").children[place - first];
    await toggle(line, order[place]);
    line.scrollIntoView();
  };

  try {
    heads();
    await load();
  } catch (error) {
    at("said").textContent = `this browser cannot open the samples: ${error}`;
    return;
  }
  at("tools").addEventListener("submit", (event) => event.preventDefault());
  at("find").addEventListener("input", select);
  for (const name of ["mode", "variant", "outcome"]) at(name).addEventListener("change", select);
  at("before").addEventListener("click", () => { first -= PAGE; show(); });
  at("after").addEventListener("click", () => { first += PAGE; show(); });
  const held = (samples.block || []).filter((block) => block !== null).length, all = (samples.id || []).length;
  at("embedded").textContent =
    held === all ? "" : `${held.toLocaleString("en")} of ${all.toLocaleString("en")} trajectories are in this page; the others lie in trajectories/.`;
  if (all) {
    select();
    await follow();
  } else {
    at("said").textContent = "there are no samples";
  }
  document.documentElement.dataset.ready = "yes";
})();
