// The chosen episode: what is known of it, its colours, its tokens.

let opened = null; // {number, episode}

function factsOf(row, episode) {
  const { of } = row;
  const facts = [
    ["score", show(episode.score)],
    ["ended by", (episode.stop_reason ?? (episode.terminated ? "its own end" : episode.truncated ? "a cut-off" : "–")).replaceAll("_", " ")],
    ["turns", String(row.turns)],
    ["sampled tokens", String(row.tokens)],
    ["environment", episode.environment ?? "none"],
    ["row", `${episode.row} (${episode.prompt_id})`],
    ["played after step", String(of.global_step)],
    ["variant", of.variant ?? of.trainer],
  ];
  if (episode.seed) facts.push(["seed", episode.seed.join(", ")]);
  for (const [name, value] of Object.entries(episode.rewards)) facts.push([name, show(value)]);
  const taken = episode.steps.taken ?? 0;
  if (episode.weight !== null && episode.weight !== undefined) facts.push(["weight in the update", show(episode.weight)]);
  if (of.phase === "train") facts.push(["passes", `${taken} of ${Object.values(episode.steps).reduce((a, b) => a + b, 0)} moved the policy`]);
  return make("dl", { class: "facts" }, ...facts.map(([name, value]) => make("div", {}, make("dt", {}, plain(name)), make("dd", {}, ...visible(value)))));
}

const REASONS = {
  target_kl: "left out of the update: the policy had gone as far as target_kl allows",
  not_finite: "left out of the update: a loss or a gradient was not finite",
  empty: "left out of the update: no episode of the mini-batch was to teach anything",
  critic_only: "trained the critic alone (critic_warmup_steps)",
};

function warningsOf(row, episode) {
  const found = [];
  for (const [outcome, count] of Object.entries(episode.steps)) {
    if (outcome in REASONS) found.push(`${count} ${count === 1 ? "pass" : "passes"} over this episode ${REASONS[outcome]}.`);
  }
  if (!row.of.complete) found.push("The training ended before this update was over.");
  if (!episode.trains) found.push("The episode does not train (on_env_error).");
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
  return make("div", { class: "head" }, make("h2", {}, title(row)), make("span", { class: kind }, result), back, before, after);
}

function drawPaint(repaint) {
  const choice = make("select", { id: "colour" }, ...Object.entries(PAINTS).map(([value, { label }]) => make("option", { value }, label)));
  choice.value = state.colour;
  choice.addEventListener("change", () => { state.colour = choice.value; writeAddress(); repaint(); });
  const meaning = make("span", { class: "legend", role: "status", id: "legend" });
  return make("div", { class: "paint" }, make("label", {}, "Colour by ", choice), meaning);
}

/** Colour what is drawn anew, as after another choice of colours. */
function repaintAll() {
  if (opened === null) return;
  const { number, episode } = opened;
  const scale = paintTokens(episode, data.episodes[number].of, document.querySelectorAll(".t"));
  $("legend").replaceChildren(...legend(episode, scale));
}

async function openEpisode() {
  hideTip();
  const number = state.episode;
  if (number === null) return;
  const pane = $("episode");
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
  pane.replaceChildren(drawHead(row, episode), factsOf(row, episode), ...warningsOf(row, episode), drawPaint(repaintAll), ...parts);
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
