// The same row through time, turns one after the other, and control tokens behind a switch.

const CONTROL = /^(<[|｜].*[|｜]>|<\/?s>|<(bos|eos|pad|start_of_turn|end_of_turn)>|\[\/?INST\])$/;
const TURN_MS = 900;

let hidesControl = false;
let playing = 0; // timer of the turn that comes next

/** "before", or the step of an evaluation; the update of a training rollout. */
const when = ({ phase, update, global_step }) => (phase === "train" ? `update ${update}` : global_step ? `step ${global_step}` : "before");

/** A button per time at which this row was played: each evaluation plays the same rows. */
function drawThrough(row) {
  if (row.of.phase === "train") return null;
  const same = data.episodes.filter((one) => one.of.phase !== "train" && one.of.name === row.of.name && one.row === row.row);
  if (same.length < 2) return null;
  const buttons = same.map((one) => {
    const [kind] = RESULT.get(one.success), mark = { yes: "✓", no: "✗", dim: "·" }[kind];
    const made = make("button", { type: "button", class: kind, title: `${title(one)}: ${one.turns} turns` }, `${when(one.of)} ${mark} ${show(one.score)}`);
    if (one.number === row.number) made.setAttribute("aria-current", "true");
    made.addEventListener("click", () => {
      const place = shown.indexOf(one.number);
      if (place >= 0) { select(place, true); return; }
      state.episode = one.number;
      writeAddress();
      openEpisode();
    });
    return made;
  });
  return make("div", { class: "through", role: "group", "aria-label": "The same row through time" }, make("span", { class: "dim" }, "this row: "), ...buttons);
}

function stopPlaying() {
  clearTimeout(playing);
  playing = 0;
  for (const part of document.querySelectorAll(".part")) part.classList.remove("later");
  if ($("play")) $("play").textContent = "▶ Play";
}

/** Show the parts of the episode one after the other. */
function play() {
  if (playing) { stopPlaying(); return; }
  const parts = [...document.querySelectorAll(".part")].slice(1);
  for (const part of parts) part.classList.add("later");
  $("play").textContent = "■ Stop";
  const next = () => {
    const part = parts.shift();
    if (!part) { stopPlaying(); return; }
    part.classList.remove("later");
    part.scrollIntoView({ block: "nearest" });
    playing = setTimeout(next, TURN_MS);
  };
  playing = setTimeout(next, TURN_MS);
}

function hideControl(hides) {
  hidesControl = hides;
  document.body.classList.toggle("plain", hides);
}

/** The switches beside the colours. */
function drawSwitches() {
  const button = make("button", { type: "button", id: "play", title: "Show the turns one after the other" }, "▶ Play");
  button.addEventListener("click", play);
  const box = make("input", { type: "checkbox", id: "control", checked: hidesControl });
  box.addEventListener("change", () => hideControl(box.checked));
  return [make("label", {}, box, " hide control tokens"), button];
}
