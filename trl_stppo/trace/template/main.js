// Keys, pointer and the beginning.

function focusToken(span) {
  if (!span) return;
  for (const other of document.querySelectorAll('.t[tabindex="0"]')) other.tabIndex = -1;
  span.tabIndex = 0;
  span.focus();
}

/** From one token to another, over the borders of parts; folded ones are passed over. */
function moveToken(from, key) {
  const spans = [...document.querySelectorAll(".tokens:not([hidden]) .t")];
  const here = spans.indexOf(from);
  const to = { ArrowRight: here + 1, ArrowLeft: here - 1, Home: 0, End: spans.length - 1 }[key];
  focusToken(spans[to]);
}

function moveTurn(by) {
  const turns = [...document.querySelectorAll("[data-turn]")];
  if (!turns.length) return;
  const part = document.activeElement?.closest?.("[data-turn]");
  const here = part ? turns.indexOf(part) : by > 0 ? -1 : turns.length;
  const next = turns[Math.max(0, Math.min(turns.length - 1, here + by))];
  next.querySelector("h3").scrollIntoView({ block: "start" });
  focusToken(next.querySelector(".t"));
}

function nextColours() {
  const names = Object.keys(PAINTS);
  state.colour = names[(names.indexOf(state.colour) + 1) % names.length];
  if ($("colour")) $("colour").value = state.colour;
  writeAddress();
  repaintAll();
}

function escape() {
  if (!$("tip").hidden) hideTip();
  else if (narrow() && document.body.dataset.view === "episode") toList();
  else $("list").focus();
}

const KEYS = {
  j: () => move(1), k: () => move(-1), n: () => moveTurn(1), p: () => moveTurn(-1), c: nextColours,
  "?": () => $("help").showModal(), Escape: escape,
  "/": () => { if (narrow() && document.body.dataset.view === "episode") toList(); $("q").focus(); $("q").select(); },
};

function listenToKeys() {
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || $("help").open) return;
    const field = event.target.closest?.("input, select, textarea");
    if (field) {
      if (event.key === "Escape") { field.blur(); $("list").focus(); }
      return;
    }
    const span = event.target.closest?.(".t");
    if (span && ["ArrowRight", "ArrowLeft", "Home", "End"].includes(event.key)) moveToken(span, event.key);
    else if (event.key in KEYS) KEYS[event.key]();
    else return;
    event.preventDefault();
  });
}

function listenToTokens() {
  const pane = $("episode");
  const token = (event) => event.target.closest?.(".t");
  pane.addEventListener("pointerover", (event) => {
    if (event.pointerType === "touch") return; // a tap is a click
    const span = token(event);
    if (span) showTip(span, opened.episode);
    else hideTip();
  });
  pane.addEventListener("pointerleave", hideTip);
  pane.addEventListener("focusin", (event) => { if (token(event)) showTip(token(event), opened.episode); });
  pane.addEventListener("focusout", hideTip);
  pane.addEventListener("click", (event) => {
    const span = token(event);
    if (!span || getSelection().type === "Range") return;
    if (document.activeElement === span) showTip(span, opened.episode);
    else focusToken(span);
  });
  document.addEventListener("scroll", () => {
    if (current !== null && current === document.activeElement) placeTip();
    else hideTip();
  }, { passive: true, capture: true });
}

// --------------------------------------------------------------------------------------------- theme

const THEMES = ["auto", "light", "dark"];
function setTheme(name) {
  if (name === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = name;
  $("theme").textContent = `Theme: ${name}`;
  try { localStorage.setItem("trl-stppo-theme", name); } catch { /* files have no storage everywhere */ }
  repaintAll();
}

function listenToTheme() {
  let kept = null;
  try { kept = localStorage.getItem("trl-stppo-theme"); } catch { /* likewise */ }
  setTheme(THEMES.includes(kept) ? kept : "auto");
  $("theme").addEventListener("click", () => {
    const now = document.documentElement.dataset.theme ?? "auto";
    setTheme(THEMES[(THEMES.indexOf(now) + 1) % THEMES.length]);
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaintAll);
}

// --------------------------------------------------------------------------------------------- begin

/** Show what the address says; from the beginning, and whenever it is changed from outside. */
async function follow() {
  document.body.dataset.view = readAddress() ? "episode" : "list";
  showFilters();
  await applyFilters(false);
  const here = shown.indexOf(state.episode);
  $("list").scrollTop = HEIGHT * Math.round(here + 0.5 - $("list").clientHeight / HEIGHT / 2);
  drawList(true);
  await openEpisode();
}

async function begin() {
  try {
    if (!("DecompressionStream" in window)) throw new Error("this browser is too old (it has no DecompressionStream)");
    await loadList();
  } catch (error) {
    $("episode").replaceChildren(make("p", { class: "hint" }, `The page cannot be shown: ${error.message}`));
    document.body.dataset.view = "episode";
    return;
  }
  fillChoices();
  listenToFilters();
  listenToList();
  listenToKeys();
  listenToTokens();
  listenToTheme();
  $("open-help").addEventListener("click", () => $("help").showModal());
  $("skip").addEventListener("click", () => $("episode").focus());
  addEventListener("hashchange", follow);
  addEventListener("popstate", follow);
  await follow();
  document.documentElement.dataset.ready = String(Math.round(performance.now()));
}

begin();
