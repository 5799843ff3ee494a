// The list: however many episodes there are, only those on the screen are elements.

const HEIGHT = 58;
const BEYOND = 6; // rows above and below the screen

const RESULT = new Map([[true, ["yes", "✓ solved"]], [false, ["no", "✗ failed"]], [null, ["dim", "not judged"]]]);

/** "Update 12, episode 3", or where an evaluation was; "row 7 #2" is the second episode of row 7. */
function title(episode) {
  const { phase, name, update, global_step } = episode.of;
  if (phase === "train") return `Update ${update}, episode ${episode.row}`;
  const where = global_step ? `After step ${global_step}` : "Before training";
  const again = episode.repetition ? ` #${episode.repetition + 1}` : "";
  return `${where}, ${name === "eval" ? "" : `${plain(name)} `}row ${episode.row}${again}`;
}

function drawItem(place) {
  const episode = data.episodes[shown[place]];
  const [kind, result] = RESULT.get(episode.success);
  const item = make("div", { class: "item", role: "option", id: `item-${episode.number}`,
    "aria-setsize": String(shown.length), "aria-posinset": String(place + 1),
    "aria-selected": String(episode.number === state.episode) },
  make("div", {},
    make("span", { class: "where" }, title(episode)),
    make("span", { class: kind }, result),
    make("span", { class: "num" }, show(episode.score)),
    make("span", { class: "end" }, `${episode.turns} ${episode.turns === 1 ? "turn" : "turns"}`)),
  make("p", {}, make("span", {}, ...visible(episode.question)), make("span", { class: "answer" }, "said: ", ...visible(episode.answer))));
  item.style.top = `${place * HEIGHT}px`;
  item.addEventListener("click", () => select(place, true));
  return item;
}

let drawn = [-1, -1];
/** Draw the rows that can be seen; all of them anew where something has changed. */
function drawList(anew = false) {
  const list = $("list");
  if (anew) {
    $("rows").style.height = `${shown.length * HEIGHT}px`;
    list.scrollTop = Math.min(list.scrollTop, Math.max(0, shown.length * HEIGHT - list.clientHeight));
  }
  const first = Math.max(0, Math.floor(list.scrollTop / HEIGHT) - BEYOND);
  const last = Math.min(shown.length, Math.ceil((list.scrollTop + list.clientHeight) / HEIGHT) + BEYOND);
  if (!anew && first === drawn[0] && last === drawn[1]) return;
  drawn = [first, last];
  const items = [];
  for (let place = first; place < last; place++) items.push(drawItem(place));
  $("rows").replaceChildren(...items);
  const chosen = state.episode !== null && $(`item-${state.episode}`);
  if (chosen) list.setAttribute("aria-activedescendant", chosen.id);
  else list.removeAttribute("aria-activedescendant");
}

/** Bring a place of the list onto the screen. */
function scrollTo(place) {
  const list = $("list"), top = place * HEIGHT;
  if (top < list.scrollTop) list.scrollTop = top;
  else if (top + HEIGHT > list.scrollTop + list.clientHeight) list.scrollTop = top + HEIGHT - list.clientHeight;
}

/** Choose the episode at a place of the list. */
function select(place, opens = false) {
  if (place < 0 || place >= shown.length) return;
  const enters = opens && narrow() && document.body.dataset.view === "list";
  state.episode = shown[place];
  if (opens) document.body.dataset.view = "episode";
  scrollTo(place);
  drawList(true);
  writeAddress(enters);
  openEpisode();
}

/** So many places on from the chosen episode; the first one where none is chosen. */
function move(by) {
  const here = shown.indexOf(state.episode);
  select(here < 0 ? 0 : Math.max(0, Math.min(shown.length - 1, here + by)));
}

function listenToList() {
  let asked = false;
  const soon = () => {
    if (asked) return;
    asked = true;
    requestAnimationFrame(() => { asked = false; drawList(); });
  };
  $("list").addEventListener("scroll", soon, { passive: true });
  addEventListener("resize", soon);
  $("list").addEventListener("keydown", (event) => {
    const page = Math.max(1, Math.floor($("list").clientHeight / HEIGHT) - 1);
    const steps = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -Infinity, End: Infinity };
    if (event.key in steps) move(steps[event.key]);
    else if (event.key === "Enter") {
      if (state.episode === null) return;
      document.body.dataset.view = "episode";
      writeAddress(narrow());
      $("episode").focus();
    } else return;
    event.preventDefault();
  });
}
