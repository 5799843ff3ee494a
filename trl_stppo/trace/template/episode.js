// The chosen episode: what is known of it, its colours, its tokens.

let opened = null; // {number, episode}

/** What is listed of an episode, below its title: label, and the words; null leaves it out. */
const FACTS = [
  ["score", (episode) => show(episode.score)],
  ["turns", (episode, row) => String(row.turns)],
  ["sampled tokens", (episode, row) => String(row.tokens)],
  ["ended by", (episode) => (episode.stop_reason ?? (episode.terminated ? "its own end" : "a cut-off")).replaceAll("_", " ")],
  ["weight in the update", (episode) => (episode.weight == null ? null : show(episode.weight))],
];
/** The same, folded away. */
const DETAILS = [
  ["environment", (episode) => episode.environment ?? "none"],
  ["variant", (episode, { of }) => of.variant ?? of.trainer],
  ["played after step", (episode, { of }) => String(of.global_step)],
  ["used in", (episode, { of }) => (of.phase === "train" ? `${episode.steps.taken ?? 0} of ${sum(Object.values(episode.steps))} updates` : null)],
  ["row", (episode) => String(episode.row)],
  ["prompt", (episode) => episode.prompt_id],
  ["seed", (episode) => episode.seed?.join(", ") ?? null],
];

function factsOf(facts) {
  const shown = facts.filter(([, words]) => words !== null);
  return make("dl", { class: "facts" }, ...shown.map(([name, words]) => make("div", {}, make("dt", { title: plain(name) }, plain(name)), make("dd", {}, ...visible(words)))));
}

let unfolded = false; // the details, of whatever episode is open
function drawFacts(row, episode) {
  const of = (facts) => facts.map(([name, words]) => [name, words(episode, row)]);
  const parts = Object.entries(episode.rewards), alone = parts.length === 1 && parts[0][1] === episode.score;
  const rewards = alone ? [] : parts.map(([name, value]) => [name, show(value)]);
  const details = make("details", { class: "more", open: unfolded }, make("summary", {}, "Details"), factsOf(of(DETAILS)));
  details.addEventListener("toggle", () => { unfolded = details.open; });
  return [factsOf([...of(FACTS), ...rewards]), details];
}

const REASONS = {
  not_finite: "left out of the update: a loss or a gradient was not finite",
  empty: "left out of the update: no episode of the mini-batch was to teach anything",
  refused: "left out of the update: the policy had gone too far",
  critic_only: "trained the critic alone (critic_warmup_steps)",
};

function warningsOf(row, episode) {
  const found = [];
  for (const [outcome, count] of Object.entries(episode.steps)) {
    if (outcome in REASONS) found.push(`${count} ${count === 1 ? "pass" : "passes"} over this episode ${REASONS[outcome]}.`);
  }
  if (!row.of.complete) found.push("The training ended before this update was over.");
  if (!episode.trains) found.push("The episode does not train: its environment failed.");
  if (episode.error) found.push(`Error: ${episode.error}`);
  return found.map((text) => make("div", { class: "warning", dir: "auto" }, ...visible(text)));
}

function drawHead(row, episode) {
  const [kind, result] = RESULT.get(episode.success);
  const button = (label, name, action) => {
    const made = make("button", { type: "button", "aria-label": name }, label);
    made.addEventListener("click", action);
    return made;
  };
  const back = button("‹ List", "Back to the list", toList);
  back.id = "back";
  const here = shown.indexOf(row.number);
  const before = button("‹ Previous", "Previous episode", () => move(-1)), after = button("Next ›", "Next episode", () => move(1));
  before.disabled = here === 0;
  after.disabled = here === shown.length - 1;
  return make("div", { class: "head" }, back, make("h2", {}, title(row)), make("span", { class: kind }, result), before, after);
}

function drawPaint(repaint) {
  const choice = make("select", { id: "colour" }, ...Object.entries(PAINTS).map(([value, { label }]) => make("option", { value }, label)));
  choice.value = state.colour;
  choice.addEventListener("change", () => { state.colour = choice.value; writeAddress(); repaint(); });
  const meaning = make("span", { class: "legend", role: "status", id: "legend" });
  return make("div", { class: "paint" }, make("label", {}, "Colour by ", choice), ...drawSwitches(), meaning);
}

/** Colour what is drawn anew, as after another choice of colours. */
function repaintAll() {
  if (opened === null) return;
  const { number, episode } = opened;
  const { of } = data.episodes[number];
  const scale = paintTokens(episode, of, document.querySelectorAll(".t"));
  $("legend").replaceChildren(...legend(episode, of, scale));
}

async function openEpisode() {
  hideTip();
  stopPlaying();
  const number = state.episode;
  const pane = $("episode");
  if (number === null) {
    opened = null;
    const clear = make("button", { type: "button" }, "Clear all filters");
    clear.addEventListener("click", clearFilters);
    pane.replaceChildren(make("p", { class: "hint" }, "No episode matches. ", clear));
    return;
  }
  let episode;
  try {
    episode = await loadEpisode(number);
  } catch (error) {
    pane.replaceChildren(make("p", { class: "hint" }, `This episode cannot be read: ${error}`));
    return;
  }
  if (number !== state.episode) return; // gone on meanwhile
  if (!episode.turnOf) prepare(episode);
  const row = data.episodes[number];
  opened = { number, episode };
  const paintLater = (spans) => { if (opened?.episode === episode && $("legend")) paintTokens(episode, row.of, spans); };
  const parts = partsOf(episode).map((part) => drawPart(episode, part, paintLater));
  pane.setAttribute("aria-label", title(row));
  const about = [make("p", { class: "asked" }, ...visible(row.question)), drawThrough(row)].filter(Boolean);
  pane.replaceChildren(drawHead(row, episode), ...about, ...drawFacts(row, episode), ...warningsOf(row, episode), drawPaint(repaintAll), ...parts);
  pane.scrollTop = 0;
  const first = pane.querySelector("[data-turn] .t") ?? pane.querySelector(".t");
  if (first) first.tabIndex = 0; // the one that Tab leads to
  repaintAll();
}

function toList() {
  document.body.dataset.view = "list";
  writeAddress();
  drawList(true);
  const here = shown.indexOf(state.episode);
  if (here >= 0) scrollTo(here);
  $("list").focus();
}
