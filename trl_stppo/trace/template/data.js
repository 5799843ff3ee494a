// What the page holds: one compressed block of JSON for the list, one per episode, one for searching.

const $ = (id) => document.getElementById(id);

/** A new element; `content` is text or elements, never markup. */
function make(tag, properties = {}, ...content) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name === "class") element.className = value;
    else if (name.startsWith("aria-") || name === "role" || name === "for" || name === "scope") element.setAttribute(name, value);
    else element[name] = value;
  }
  element.append(...content.filter((part) => part !== null && part !== undefined));
  return element;
}

/** The JSON of a block. */
async function block(id) {
  const binary = atob($(id).textContent);
  const bytes = new Uint8Array(binary.length);
  for (let i = 0; i < binary.length; i++) bytes[i] = binary.charCodeAt(i);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

const data = { episodes: [], opened: new Map() };

async function loadList() {
  const { rows, updates } = await block("list-data");
  data.episodes = rows.map((row, number) => ({ ...row, number, of: updates[row.group] }));
}

/** All of an episode; the newest few are kept. */
async function loadEpisode(number) {
  if (!data.opened.has(number)) {
    data.opened.set(number, block(`episode-${number}`));
    if (data.opened.size > 12) data.opened.delete(data.opened.keys().next().value);
  }
  return data.opened.get(number);
}

let texts = null;
/** The texts of all episodes in small letters, once somebody searches. */
function loadTexts() {
  texts ??= block("texts").then((all) => all.map((text) => text.toLowerCase()));
  return texts;
}

// ------------------------------------------------------------------------------------ text and numbers

/** A figure in a few digits; a dash where there is none. */
function show(value, digits = 3) {
  if (value === null || value === undefined) return "–";
  if (typeof value !== "number") return String(value);
  if (value === 0) return "0";
  const size = Math.abs(value);
  const text = size >= 1e5 || size < 1e-4 ? value.toExponential(2) : value.toPrecision(digits);
  return text.replace(/(\.\d*?)0+(?=$|e)/, "$1").replace(/\.(?=$|e)/, "").replace("-", "−");
}

// Without glyph, or turning the direction of the text around them: shown by their number. A zero width
// joiner stays, which holds emoji together.
const INVISIBLE = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ufeff\ufff9-\ufffb]|[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]/g;

const code = (character) => `U+${character.charCodeAt(0).toString(16).toUpperCase().padStart(4, "0")}`;

/** The same where there can be no elements, as in the choices of a filter. */
const plain = (text) => text.replace(INVISIBLE, (character) => `[${code(character)}]`);

/** The text as nodes that can do no harm. */
function visible(text) {
  const nodes = [];
  let done = 0;
  for (const found of text.matchAll(INVISIBLE)) {
    if (found.index > done) nodes.push(document.createTextNode(text.slice(done, found.index)));
    nodes.push(make("span", { class: "mark" }, code(found[0])));
    done = found.index + found[0].length;
  }
  if (done < text.length) nodes.push(document.createTextNode(text.slice(done)));
  return nodes;
}
