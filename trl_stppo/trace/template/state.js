// What is chosen: filters, order, episode, colours. The address keeps it.

const FILTERS = ["q", "name", "success", "stop", "environment", "turns-from", "turns-to", "updates-from", "updates-to", "sort"];
const state = { episode: null, colour: "ratio" };
for (const name of FILTERS) state[name] = "";

let shown = []; // numbers of the episodes that pass the filters, in order

function readAddress() {
  const given = new URLSearchParams(location.hash.slice(1));
  for (const name of FILTERS) state[name] = given.get(name) ?? "";
  const colour = given.get("colour");
  state.colour = colour in PAINTS ? colour : "ratio";
  const key = given.get("episode");
  const found = data.episodes.find((episode) => episode.key === key);
  state.episode = found ? found.number : null;
  return Boolean(found);
}

/** Put the state into the address; `step` makes the back button come here again. */
function writeAddress(step = false) {
  const given = new URLSearchParams();
  if (state.episode !== null && document.body.dataset.view === "episode") given.set("episode", data.episodes[state.episode].key);
  else if (state.episode !== null && !narrow()) given.set("episode", data.episodes[state.episode].key);
  for (const name of FILTERS) if (state[name]) given.set(name, state[name]);
  if (state.colour !== "ratio") given.set("colour", state.colour);
  const address = `#${given}`;
  if (address === location.hash || (address === "#" && !location.hash)) return;
  history[step ? "pushState" : "replaceState"](null, "", address);
}

const narrow = () => matchMedia("(max-width: 640px)").matches;

/** Scores may be missing, and infinite ones are words. */
const rank = (episode) => (Number.isNaN(Number(episode.score ?? NaN)) ? -Infinity : Number(episode.score));
const byScore = (a, b) => (rank(a) === rank(b) ? a.number - b.number : rank(a) < rank(b) ? -1 : 1);

const ORDERS = {
  newest: (a, b) => b.number - a.number,
  best: (a, b) => byScore(b, a),
  worst: byScore,
  turns: (a, b) => b.turns - a.turns || a.number - b.number,
  tokens: (a, b) => b.tokens - a.tokens || a.number - b.number,
  clipped: (a, b) => b.clipped - a.clipped || a.number - b.number,
};

function within(value, from, to) {
  return (from === "" || value >= Number(from)) && (to === "" || value <= Number(to));
}

function passes(episode) {
  const result = episode.success === null ? "unknown" : episode.success ? "yes" : "no";
  return (!state.name || episode.of.name === state.name)
    && (!state.success || result === state.success)
    && (!state.stop || (episode.stop ?? "unknown") === state.stop)
    && (!state.environment || (episode.environment ?? "none") === state.environment)
    && within(episode.turns, state["turns-from"], state["turns-to"])
    && within(episode.of.update, state["updates-from"], state["updates-to"]);
}

/** What to see first: the newest failed episode of training with clipped tokens, or what comes nearest to it. */
function telling(numbers) {
  const worth = ({ of, success, clipped }) => (of.phase === "train" ? 4 : 0) + (clipped > 0 ? 2 : 0) + (success === false ? 1 : 0);
  const better = (best, number) => (best === null || worth(data.episodes[number]) >= worth(data.episodes[best]) ? number : best);
  return numbers.reduce(better, null);
}

/** Find the episodes that pass, and sort them; the chosen one is among them, and opened if that is another. */
async function applyFilters(opens = true) {
  const wanted = state.q.toLowerCase();
  let found = data.episodes.filter(passes);
  if (wanted) {
    $("count").textContent = "Searching…";
    const texts = await loadTexts();
    if (wanted !== state.q.toLowerCase()) return; // typed on meanwhile
    found = found.filter((episode) => texts[episode.number].includes(wanted));
  }
  if (state.sort in ORDERS) found.sort(ORDERS[state.sort]);
  shown = found.map((episode) => episode.number);
  const all = data.episodes.length;
  $("count").textContent = shown.length === all ? `${all} episodes` : `${shown.length} of ${all} episodes`;
  const active = FILTERS.filter((name) => name !== "q" && name !== "sort" && state[name]).length;
  $("more").textContent = active ? `Filters (${active})` : "Filters";
  if (!shown.includes(state.episode)) {
    state.episode = telling(shown);
    if (opens) openEpisode();
  }
  drawList(true);
}

function clearFilters() {
  for (const name of FILTERS) state[name] = "";
  showFilters();
  applyFilters().then(writeAddress);
}

// ------------------------------------------------------------------------------------------ the form

function fillChoices() {
  const choices = {
    name: data.episodes.map((episode) => episode.of.name),
    stop: data.episodes.map((episode) => episode.stop ?? "unknown"),
    environment: data.episodes.map((episode) => episode.environment ?? "none"),
  };
  for (const [id, values] of Object.entries(choices)) {
    const counts = new Map();
    for (const value of values) counts.set(value, (counts.get(value) ?? 0) + 1);
    const options = [...counts].sort((a, b) => b[1] - a[1]).map(([value, count]) => make("option", { value }, `${plain(value).slice(0, 80)} (${count})`));
    $(id).replaceChildren(make("option", { value: "" }, "any"), ...options);
  }
}

function showFilters() {
  for (const name of FILTERS) $(name).value = state[name];
}

function expandFilters(open) {
  $("fields").hidden = !open;
  $("more").setAttribute("aria-expanded", String(open));
}

function listenToFilters() {
  let waiting = 0;
  const changed = () => {
    for (const name of FILTERS) state[name] = $(name).value;
    applyFilters().then(writeAddress);
  };
  for (const name of FILTERS) {
    $(name).addEventListener($(name).tagName === "SELECT" ? "change" : "input", () => {
      clearTimeout(waiting);
      waiting = setTimeout(changed, name === "q" ? 150 : 0);
    });
  }
  $("filters").addEventListener("submit", (event) => event.preventDefault());
  $("more").addEventListener("click", () => expandFilters($("fields").hidden));
  $("reset").addEventListener("click", clearFilters);
}
