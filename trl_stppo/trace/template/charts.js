// Small charts over the updates: a line for training, dots for evaluations.

// Name, metric of the whole batch, figure of an episode, and where the axis ends at least.
const CHARTS = [
  ["success", "episode/success_rate", (episode) => (episode.success === null ? null : Number(episode.success)), 1],
  ["turns", "turns/mean", (episode) => episode.turns],
  ["score", "episode/score", (episode) => episode.score],
];

let points = null;
/** Per chart the points of training and evaluation: {x, y, update}. */
function collectPoints() {
  const groups = new Map();
  for (const episode of data.episodes) {
    const { phase, name, update, global_step } = episode.of;
    const key = `${name} ${phase === "train" ? update : global_step}`;
    if (!groups.has(key)) groups.set(key, { of: episode.of, episodes: [] });
    groups.get(key).episodes.push(episode);
  }
  points = CHARTS.map(([, figure, ofEpisode]) => {
    const found = { train: [], eval: [] };
    for (const { of, episodes } of groups.values()) {
      let y = of.figures[figure] ?? null; // of the whole batch; of what is recorded where that is not known
      if (y === null) {
        const values = episodes.map(ofEpisode).filter(Number.isFinite);
        if (values.length) y = values.reduce((sum, value) => sum + value, 0) / values.length;
      }
      if (!Number.isFinite(y)) continue;
      found[of.phase].push({ x: of.update + (of.phase === "eval" ? 0.5 : 0), y, update: of.update });
    }
    return found;
  });
}

function svg(tag, attributes, ...content) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...content);
  return element;
}

function drawChart([label, , , top = -Infinity], { train, eval: held }) {
  const all = [...train, ...held];
  if (!all.length) return null;
  const xs = all.map((point) => point.x), ys = all.map((point) => point.y);
  const [left, right] = [Math.min(...xs), Math.max(...xs)];
  const low = Math.min(0, ...ys), high = Math.max(...ys, top, low + 1e-9);
  const x = (value) => (right > left ? 2 + (96 * (value - left)) / (right - left) : 50).toFixed(2);
  const y = (value) => (40 - (36 * (value - low)) / (high - low)).toFixed(2);
  const at = (point) => `${x(point.x)} ${y(point.y)}`;
  const picture = svg("svg", { viewBox: "0 0 100 44", preserveAspectRatio: "none", role: "img" });
  picture.append(svg("path", { class: "base", d: `M0 ${y(low)}H100` }));
  if (state.episode !== null) {
    const here = Math.max(left, Math.min(right, data.episodes[state.episode].of.update));
    picture.append(svg("path", { class: "here", d: `M${x(here)} 2V42` }));
  }
  if (train.length > 1) picture.append(svg("path", { d: `M${train.map(at).join("L")}` }));
  else for (const point of train) picture.append(svg("path", { class: "point", d: `M${at(point)}h0` }));
  for (const point of held) picture.append(svg("path", { class: "held", d: `M${at(point)}h0` }));
  const line = train.length ? train : held;
  const first = line[0], last = line[line.length - 1];
  const words = `${label}: ${show(first.y, 2)} in update ${first.update}, ${show(last.y, 2)} in update ${last.update}`;
  picture.setAttribute("aria-label", held.length ? `${words}; ${held.length} evaluations` : words);
  const caption = make("p", {}, `${label} `, make("b", {}, show(last.y, 2)));
  const nearest = (event) => {
    const box = picture.getBoundingClientRect();
    const wanted = left + (((event.clientX - box.left) / box.width - 0.02) / 0.96) * (right - left);
    return all.reduce((best, point) => (Math.abs(point.x - wanted) < Math.abs(best.x - wanted) ? point : best));
  };
  picture.addEventListener("pointermove", (event) => {
    const point = nearest(event);
    caption.replaceChildren(`${label}, update ${point.update}: `, make("b", {}, show(point.y, 2)));
  });
  picture.addEventListener("pointerleave", () => caption.replaceChildren(`${label} `, make("b", {}, show(last.y, 2))));
  picture.addEventListener("click", (event) => {
    const update = String(nearest(event).update);
    const alone = state["updates-from"] === update && state["updates-to"] === update;
    state["updates-from"] = state["updates-to"] = alone ? "" : update;
    showFilters();
    expandFilters(true);
    applyFilters().then(writeAddress);
  });
  return make("div", { class: "chart", title: "Click for the episodes of an update" }, caption, picture);
}

function drawCharts() {
  if (points === null) collectPoints();
  const drawn = CHARTS.map((chart, i) => drawChart(chart, points[i])).filter((chart) => chart !== null);
  $("charts").replaceChildren(...drawn);
}
