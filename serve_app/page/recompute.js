// Requests over a text with known tokens, a piece at a time.

import { bytes, get, post, stream } from "./api.js";
import { columns } from "./arrow.js";
import { rowsOf, tensors } from "./tensors.js";

/** Whether fewer positions in a request may be allowed. */
export const isTooLarge = ({ code }) => ["capture_too_large", "logit_lens_too_large", "readouts_too_large"].includes(code);

const MOST_FEATURES = 1024; // the most that a request may ask for a token

/** The tokens of a source form's text: `{ ids, texts, count }`, of which `count` belong to the prompt. */
export async function tokenized(model, { text, chat, ids, count }, signal) {
  if (ids) {
    const { token_texts: texts } = await post("detokenize", { model, tokens: ids, return_token_strs: true }, signal);
    return { ids, texts, count: count || ids.length };
  }
  const what = chat ? { messages: [{ role: "user", content: text }] } : { prompt: text };
  const { tokens, token_texts: texts } = await post("tokenize", { model, ...what, return_token_strs: true }, signal);
  return { ids: tokens, texts, count: tokens.length };
}

/** The texts of tokens, or their ids if the model is not served: `{ texts, served }`. */
export async function textsOf(model, ids, signal) {
  try {
    const { texts } = await tokenized(model, { ids }, signal);
    return { texts, served: true };
  } catch (error) {
    if (error.status !== 404) throw error;
    return { texts: ids.map((one) => `‹${one}›`), served: false };
  }
}

/** A source form's input as tokens, with the model's answer after a text: `{ model, ids, texts, count }`. */
export async function answered(model, asked, code, signal) {
  const { ids, texts, count } = await tokenized(model, asked, signal);
  if (!asked.ids && asked.max_tokens) {
    const body = continuing(model, [...ids], asked);
    code.note("The completion", { method: "POST", path: "v1/completions", body });
    const add = (tokens) => (ids.push(...tokens.map(({ id }) => id)), texts.push(...tokens.map((one) => one.text)));
    await complete(body, add, signal);
  }
  return { model, ids, texts, count };
}

/** The fields of a request that continues these token ids. */
export const continuing = (model, ids, { max_tokens, temperature, top_p, seed }, more = {}) => ({
  ...{ model, prompt: ids, max_tokens, temperature, top_p, seed },
  logprobs: 5,
  return_token_ids: true,
  ...more,
});

/** Streams a completion; calls `ontokens(tokens, choice)` for each piece. Returns the last choice, with `norms` and the like. */
export async function complete(body, ontokens, signal) {
  let last = {};
  for await (const event of stream("v1/completions", body, signal)) {
    for (const choice of event.choices) {
      ontokens(ofCompletion(choice), choice);
      if (choice.finish_reason) last = choice;
    }
  }
  return last;
}

function ofCompletion({ logprobs, token_ids: ids = [] }) {
  const ranked = (top) => Object.entries(top ?? {}).map(([text, logprob]) => ({ text, logprob })).sort((a, b) => b.logprob - a.logprob);
  return (logprobs?.tokens ?? []).map((text, i) => ({ text, id: ids[i], logprob: logprobs.token_logprobs[i] ?? undefined, top: ranked(logprobs.top_logprobs[i]) }));
}

/**
 * The request for the lens at positions `from` to before `to` of these tokens, with the rank of the last layer's top
 * token; `through` is a fitted lens's name, or empty. Later tokens are not run.
 */
export const lensBody = (model, ids, from, to, top_k, through, layers = "all") => ({
  model,
  prompt: ids.slice(0, to),
  max_tokens: 0,
  logit_lens: { layers, top_k, tokens: { from, to }, targets: "last_layer", ...(through ? { lens: through } : {}) },
});

export const span = (from, to) => Array.from({ length: to - from }, (_, i) => from + i);

/** Entries of the lens, `{ position, token, layers }` each. */
export async function lens(body, signal) {
  const answer = await post("v1/completions", body, signal);
  return answer.choices[0].logit_lens.prompt ?? [];
}

/**
 * Interventions of an answer after `offset` tokens, for a request whose prompt is the first `end` tokens of its text:
 * the tokens that they choose by name become positions.
 */
export const again = (interventions, offset) => (end) => ({
  interventions: interventions.map((one) => ({ ...one, tokens: placed(one.tokens, offset, end) })),
});

const placed = (tokens, offset, end) => ({ prompt_last: { from: offset - 1, to: offset }, generated: { from: offset, to: end } })[tokens] ?? tokens;

const upTo = (ids, positions) => ids.slice(0, Math.max(...positions) + 1);

/** The request for rows of a point at some positions, inline in the answer; `more(end)` adds fields for its `end` tokens. */
export const rowsBody = (model, ids, points, positions, more = () => ({})) => ({
  model,
  prompt: upTo(ids, positions),
  max_tokens: 0,
  capture: { points, tokens: { positions }, mode: "trace", return: "inline", dtype: "float32" },
  ...more(upTo(ids, positions).length),
});

/** Rows of points by the point's name; each request has as many positions as the server allows. */
export async function rows(model, ids, points, positions, signal, more) {
  const found = {};
  await inParts(positions, async (some) => {
    const answer = await post("v1/completions", rowsBody(model, ids, points, some, more), signal);
    for (const [name, { data }] of Object.entries(answer.activations_meta.runs[0].points)) (found[name] ??= []).push(...data);
  });
  return found;
}

/** The request for a readout's values at some positions; `more` as in `rowsBody`. */
export const scoresBody = (model, ids, { name, kind, values }, positions, more = () => ({})) => ({
  model,
  prompt: upTo(ids, positions),
  max_tokens: 0,
  readouts: [{ name, tokens: { positions }, ...(kind === "sae" ? { top_k: Math.min(values, MOST_FEATURES) } : {}) }],
  ...more(upTo(ids, positions).length),
});

/** A readout's values at some positions: a list for each, or for an autoencoder `[{ feature, value }]`, the largest first. */
export async function scores(model, ids, readout, positions, signal, more) {
  const found = [];
  await inParts(positions, async (some) => {
    const answer = await post("v1/completions", scoresBody(model, ids, readout, some, more), signal);
    found.push(...answer.choices[0].readouts[readout.name].prompt.values);
  });
  return found;
}

async function inParts(positions, read) {
  let step = positions.length;
  for (let first = 0; first < positions.length; ) {
    const some = positions.slice(first, first + step);
    try {
      await read(some);
      first += some.length;
    } catch (error) {
      if (!isTooLarge(error) || step === 1) throw error;
      step = Math.ceil(step / 2);
    }
  }
}

/** The request that says where a stored run lies. */
export const storedQuery = ({ session_id: session, run_id: run }) => ({ method: "GET", path: "v1/activations/runs", query: { session, run } });

/** What `bytes` needs for the file of a run that the server lists. */
export const fileOf = ({ session_id: session, file, owner }) => [
  `v1/activations/session/${encodeURIComponent(session)}/files/${encodeURIComponent(file)}`,
  owner ? { owner } : {},
];

/** All sessions that fit the filters, the last used ones first. */
export async function storedSessions(filters, signal) {
  const found = [];
  for (let after = ""; ; ) {
    const { data, has_more: more } = await get("v1/activations/sessions", { ...filters, limit: 1000, after }, signal);
    found.push(...data);
    if (!more) return found.sort((a, b) => b.updated - a.updated);
    const { id, owner } = data.at(-1);
    after = owner ? `${id}@${owner}` : id;
  }
}

const columnsOf = (facts, points, signal) =>
  columns(facts, points, async (first, end) => (await bytes(...fileOf(facts), { signal, first, end })).arrayBuffer());

/** Points of a stored run by name, as in `arrow.js`, with `position` and `token_id`. */
export async function stored(run, points, signal) {
  const { path, query } = storedQuery(run);
  const { data } = await get(path, query, signal);
  if (!data.length) throw new Error(`The session ${run.session_id} has no run ${run.run_id} any more.`);
  return columnsOf(data[0], points, signal);
}

/** The stored tokens of a run that the server has listed. */
export async function storedTokens(facts, signal) {
  const found = await columnsOf(facts, [], signal);
  const [ids, positions] = [[...found.token_id.values], [...found.position.values]];
  return { names: Object.keys(facts.points), ids, positions, isWhole: positions.length === facts.tokens };
}

/** A stored run's token ids and the rows of a point at them. */
export async function storedRows(run, point, signal) {
  const found = await stored(run, [point], signal);
  return { ids: [...found.token_id.values], positions: [...found.position.values], rows: rowsOf(found[point]) };
}

/** The installed readouts or lenses; of one model if it is named. */
export async function readouts(model, kind = "readouts") {
  const { data } = await get(`v1/${kind}`, { limit: 1000 });
  return model ? data.filter((one) => one.model === model) : data;
}

/** The direction in which a linear readout's value grows fastest, as numbers. */
export async function directionOf({ name }, column, signal) {
  const found = await tensors(await bytes(`v1/readouts/${encodeURIComponent(name)}/file`, {}, { signal }));
  const row = rowsOf(found.weight)[column];
  return Array.from(row, (weight, i) => weight / (found.std?.values[i] ?? 1)); // rows are standardized first
}

/** One uploaded vector. */
export async function vector(name, signal) {
  const [id, ...rest] = name.split("/");
  const found = await tensors(await bytes(`v1/tensors/${encodeURIComponent(id)}`, {}, { signal }));
  return Array.from(found[rest.join("/")]?.values ?? Object.values(found)[0].values);
}
