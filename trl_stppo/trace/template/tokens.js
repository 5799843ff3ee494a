// The tokens of an episode, in its parts, and the figures of one of them.

const MOST_TOKENS = 4000; // of a part at once; a button shows more
const MOST_CHARACTERS = 20000; // of a token

/** Offsets of tokens within the completion -> who has written them. */
function roleOf(episode, i) {
  if (i < 0) return { name: "prompt", colour: "prompt", turn: null };
  const turn = episode.turnOf[i];
  if (turn === undefined) return { name: episode.observations, colour: episode.observations, turn: null };
  return { name: `turn ${turn + 1}`, colour: turn % 2 ? "turn-other" : "turn", turn };
}

/** Work out what the page needs of an episode besides what is in the file. */
function prepare(episode) {
  episode.length = episode.pieces.length - episode.prompt_tokens;
  episode.turnOf = [];
  episode.turnRatio = Array(episode.length).fill(null);
  episode.turns = episode.turn_spans.map(([start, end], turn) => {
    const facts = { turn, start, end, ratios: [], advantages: [], clipped: 0 };
    for (let i = start; i < end; i++) {
      episode.turnOf[i] = turn;
      if (at(episode.token_log_ratio, i) !== null) facts.ratios.push(episode.token_log_ratio[i]);
      if (at(episode.advantages, i) !== null) facts.advantages.push(episode.advantages[i]);
      if (episode.clipped?.[i]) facts.clipped += 1;
    }
    facts.logRatio = mean(facts.ratios);
    if (facts.logRatio !== null) episode.turnRatio.fill(facts.logRatio, start, end);
    return facts;
  });
  return episode;
}

const sum = (values) => values.reduce((all, value) => all + value, 0);
const mean = (values) => (values.length ? sum(values) / values.length : null);

/** Prompt, turns and what is between them, in order; offsets count from the first token of all. */
function partsOf(episode) {
  const parts = [], first = episode.prompt_tokens;
  if (first) parts.push({ title: "Prompt", start: 0, end: first, facts: null });
  let done = 0;
  const between = (end) => {
    if (end > done) parts.push({ title: episode.observations === "tool" ? "Tool" : "Environment", start: first + done, end: first + end, facts: null });
  };
  for (const facts of episode.turns) {
    between(facts.start);
    parts.push({ title: `Turn ${facts.turn + 1}`, start: first + facts.start, end: first + facts.end, facts });
    done = facts.end;
  }
  between(episode.length);
  return parts;
}

function drawToken(episode, i) {
  const piece = episode.pieces[i];
  const span = make("span", { class: "t", tabIndex: -1 });
  span.dataset.i = i;
  if (CONTROL.test(piece.trim())) span.classList.add("control");
  if (piece === "") span.classList.add("part-of");
  else if (piece.startsWith("\n")) span.classList.add("newline");
  if (piece.length <= MOST_CHARACTERS) {
    span.append(...visible(piece));
    return span;
  }
  const more = make("button", { type: "button", class: "mark" }, `${piece.length - MOST_CHARACTERS} more characters`);
  more.addEventListener("click", () => more.replaceWith(...visible(piece.slice(MOST_CHARACTERS))));
  span.append(...visible(piece.slice(0, MOST_CHARACTERS)), more);
  return span;
}

/** A value of the row in words; a list of answers without brackets. */
function spelt(value) {
  if (Array.isArray(value)) return value.map(spelt).join(" | ");
  return typeof value === "string" ? value : JSON.stringify(value);
}

function fact(label, value) {
  return make("span", {}, `${label} `, make("b", {}, value));
}

function drawPart(episode, part, repaint) {
  const { title: name, start, end, facts } = part;
  const head = make("h3", {}, name, fact(end - start === 1 ? "token" : "tokens", String(end - start)));
  if (facts) {
    const reward = episode.turn_rewards?.[facts.turn];
    const ratio = facts.logRatio === null ? null : Math.exp(facts.logRatio);
    head.append(fact("reward", show(reward)), fact("ratio", show(ratio, 4)), fact("advantage", show(mean(facts.advantages))));
    if (episode.clipped) head.append(fact("clipped", `${facts.clipped} of ${facts.end - facts.start}`));
  }
  const tokens = make("div", { class: "tokens", role: "group", "aria-label": `${name}, ${end - start} tokens`, dir: "auto" });
  let drawn = start;
  const more = make("button", { type: "button" });
  const drawMore = () => {
    const until = Math.min(end, drawn + MOST_TOKENS);
    const spans = [];
    for (; drawn < until; drawn++) {
      const image = episode.image_spans.find(([start, end]) => start <= drawn && drawn < end);
      drawn = image ? image[1] - 1 : drawn;
      spans.push(drawToken(episode, drawn));
      if (image) spans.at(-1).classList.add("image");
    }
    tokens.append(...spans);
    more.textContent = `Show ${end - drawn} more tokens`;
    more.hidden = drawn === end;
    repaint(spans);
  };
  more.addEventListener("click", drawMore);
  drawMore();
  const section = make("section", { class: "part" }, head, tokens, more);
  const columns = name === "Prompt" ? Object.entries(episode.columns) : [];
  if (columns.length) section.append(factsOf(columns.map(([column, value]) => [column, spelt(value)])));
  const place = facts ? facts.turn + 1 : name === "Prompt" ? 0 : -1;
  const when = facts ? `after ${name.toLowerCase()}` : "at the beginning";
  const picture = episode.pictures?.[place];
  if (picture) section.append(drawPicture(picture, when));
  for (const url of episode.images?.[place] ?? []) {
    section.append(url ? make("img", { class: "picture seen", alt: `Image ${when}`, src: url }) : make("p", { class: "picture" }, "Image left out: the record is full."));
  }
  if (facts) section.dataset.turn = facts.turn;
  else if (end - start > 300) fold(head, tokens, name !== "Prompt");
  return section;
}

/** What the environment's `render` gave. An image runs no script of an SVG. */
function drawPicture(picture, when) {
  const label = `The environment ${when}`;
  if (!/^\s*(<\?xml[^>]*>\s*)?<svg[\s>]/.test(picture)) return make("pre", { class: "picture", role: "img", "aria-label": label }, ...visible(picture));
  const svg = /<svg[^>]*\sxmlns=/.test(picture) ? picture : picture.replace("<svg", '<svg xmlns="http://www.w3.org/2000/svg"');
  return make("img", { class: "picture", alt: label, src: `data:image/svg+xml,${encodeURIComponent(svg)}` });
}

/** Let a long part that nobody has sampled be folded away. */
function fold(head, tokens, open) {
  const button = make("button", { type: "button" });
  const set = (opens) => {
    tokens.hidden = !opens;
    button.textContent = opens ? "Fold" : "Show";
    button.setAttribute("aria-expanded", String(opens));
  };
  button.addEventListener("click", () => set(tokens.hidden));
  set(open);
  head.append(button);
}

// ----------------------------------------------------------------------------------- one token's figures

function figuresOf(episode, i) {
  const offset = i - episode.prompt_tokens, role = roleOf(episode, offset);
  const rows = [["id", String(episode.token_ids[i])], ["position", String(i)], ["role", role.name]];
  if (role.turn === null) return rows;
  const exp = (value) => (value === null ? null : Math.exp(value));
  const { of } = data.episodes[state.episode];
  rows.push(["logprob when sampled", show(at(episode.old_logprobs, offset))]);
  rows.push(["token ratio", show(exp(at(episode.token_log_ratio, offset)), 4)]);
  rows.push(["turn ratio", show(exp(episode.turnRatio[offset]), 4)]);
  rows.push([`ratio per ${of.level === "sequence" ? "episode" : of.level}`, show(exp(at(episode.log_ratio, offset)), 4)]);
  rows.push(["advantage", show(at(episode.advantages, offset))]);
  if (episode.values) rows.push(["value", show(at(episode.values, offset))], ["return", show(at(episode.returns, offset))]);
  const clipped = episode.clipped?.[offset];
  const inLoss = episode.loss_mask?.[offset];
  rows.push(["in the update", inLoss === false ? "not in the loss" : clipped === true ? "clipped" : clipped === false ? "kept" : "no pass"]);
  return rows;
}

let current = null; // the token whose figures are shown
function showTip(span, episode) {
  hideTip();
  current = span;
  span.classList.add("here");
  const i = Number(span.dataset.i), tip = $("tip");
  const piece = episode.pieces[i];
  const text = piece === "" ? "a part of the next character" : JSON.stringify(piece.slice(0, 200));
  const figures = figuresOf(episode, i).flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, value)]);
  tip.replaceChildren(make("code", { dir: "ltr" }, ...visible(text)), make("dl", {}, ...figures));
  tip.hidden = false;
  // A span alone is not announced, and of all tokens only this one need be.
  const spoken = { role: "group", "aria-label": tip.firstChild.textContent, "aria-describedby": "tip" };
  for (const [name, value] of Object.entries(spoken)) span.setAttribute(name, value);
  placeTip();
}

/** Put the figures below their token, or above where there is no room. */
function placeTip() {
  const tip = $("tip");
  const box = current.getClientRects()[0] ?? current.getBoundingClientRect(), own = tip.getBoundingClientRect();
  const left = Math.max(8, Math.min(box.left, innerWidth - own.width - 8));
  const below = box.bottom + 8 + own.height <= innerHeight;
  tip.style.left = `${left}px`;
  tip.style.top = `${below ? box.bottom + 8 : Math.max(8, box.top - own.height - 8)}px`;
}

function hideTip() {
  if (current === null) return;
  current.classList.remove("here");
  for (const name of ["role", "aria-label", "aria-describedby"]) current.removeAttribute(name);
  current = null;
  $("tip").hidden = true;
}
