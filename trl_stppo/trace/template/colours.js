// Colours of tokens. Blue against orange, Okabe and Ito's, can be told apart with any kind of colour vision,
// and clipped tokens are underlined too.

const POLES = {
  light: { low: [0, 114, 178], high: [213, 94, 0], one: [0, 158, 115], back: [255, 255, 255] },
  dark: { low: [86, 180, 233], high: [230, 159, 0], one: [0, 158, 115], back: [21, 23, 27] },
};

/** Ways to colour: label, kind of scale, and the figure of a token. */
const PAINTS = {
  ratio: { label: "ratio (as trained)", scale: "ratio", figure: (episode, i) => at(episode.log_ratio, i) },
  "turn-ratio": { label: "turn ratio", scale: "ratio", figure: (episode, i) => episode.turnRatio[i] },
  "token-ratio": { label: "token ratio", scale: "ratio", figure: (episode, i) => at(episode.token_log_ratio, i) },
  advantage: { label: "advantage", scale: "both", figure: (episode, i) => at(episode.advantages, i) },
  value: { label: "value", scale: "one", figure: (episode, i) => at(episode.values, i) },
  return: { label: "return", scale: "one", figure: (episode, i) => at(episode.returns, i) },
  clipped: { label: "clipped or kept" },
  role: { label: "role" },
};

const at = (list, i) => (list && typeof list[i] === "number" ? list[i] : null);

const theme = () => document.documentElement.dataset.theme
  || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");

const mix = (from, to, share) => from.map((part, i) => Math.round(part + (to[i] - part) * share));
const css = (colour) => `rgb(${colour.join(" ")})`;

/** Black or white, whichever can be read on the colour. */
function ink(colour) {
  const [r, g, b] = colour.map((part) => {
    const share = part / 255;
    return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
  });
  const light = 0.2126 * r + 0.7152 * g + 0.0722 * b;
  return (light + 0.05) ** 2 > 0.05 * 1.05 ? "#111" : "#fff";
}

/** The lowest and the highest ratio that is not clipped; infinity, which JSON has as a word, for no limit. */
const clipRange = ({ clip_range: [below, above] }) => [1 - Number(below), 1 + Number(above)];

/** From where to where the colours of an episode go; those of ratios are the same in all of a run. */
function range(paint, episode, group) {
  const values = [];
  for (let i = 0; i < episode.length; i++) {
    const value = paint.figure(episode, i);
    if (value !== null) values.push(value);
  }
  if (!values.length) return null;
  const low = values.reduce((a, b) => Math.min(a, b)), high = values.reduce((a, b) => Math.max(a, b));
  if (paint.scale === "one") return { low, high };
  // Ratios well inside the clip range stay pale: nothing is wrong with them.
  const bounds = clipRange(group).map((edge) => Math.abs(Math.log(edge))).filter(Number.isFinite);
  const end = paint.scale === "ratio" ? 2 * Math.max(...bounds) : Math.max(-low, high);
  return { low: -(end || 1e-9), high: end || 1e-9 };
}

function colourOf(paint, scale, value) {
  const { low, high, one, back } = POLES[theme()];
  if (paint.scale === "one") {
    const share = scale.high > scale.low ? (value - scale.low) / (scale.high - scale.low) : 0.5;
    return mix(back, one, 0.06 + 0.84 * share);
  }
  const share = Math.min(1, Math.abs(value) / scale.high);
  return mix(back, value < 0 ? low : high, 0.92 * share ** 0.8);
}

/** Colour all tokens that are drawn. */
function paintTokens(episode, group, spans) {
  const paint = PAINTS[state.colour];
  const scale = paint.figure ? range(paint, episode, group) : null;
  for (const span of spans) {
    const i = Number(span.dataset.i) - episode.prompt_tokens;
    const role = roleOf(episode, i);
    const value = scale && i >= 0 ? paint.figure(episode, i) : null;
    span.style.background = span.style.color = "";
    const byRole = state.colour === "role" || (paint.figure && scale === null);
    const marks = paint.scale === "ratio" || state.colour === "clipped";
    span.classList.toggle("clip", Boolean(marks && episode.clipped?.[i]));
    span.classList.toggle("dim", !byRole && role.turn === null);
    if (byRole) span.style.background = `var(--${role.colour})`;
    else if (state.colour === "clipped" && i >= 0 && typeof episode.clipped?.[i] === "boolean") {
      span.style.background = episode.clipped[i] ? "var(--clipped)" : "var(--kept)";
    } else if (value !== null) {
      const colour = colourOf(paint, scale, value);
      span.style.background = css(colour);
      span.style.color = ink(colour);
    }
  }
  return scale;
}

function swatch(colour, label) {
  const box = make("i");
  box.style.background = `var(--${colour})`;
  return make("span", {}, box, label);
}

/** What the colours mean. */
function legend(episode, group, scale) {
  const paint = PAINTS[state.colour];
  if (state.colour === "role" || (paint.figure && scale === null)) {
    const why = paint.figure ? `no ${paint.label} recorded; by role: ` : "";
    return [why, swatch("prompt", "prompt"), swatch("turn", "model, alternating shades"),
      swatch(episode.observations, episode.observations)];
  }
  if (state.colour === "clipped") {
    if (!episode.clipped) return ["no update has passed over these tokens"];
    return [swatch("kept", "kept"), swatch("clipped", "clipped, underlined"), "no colour: not in the loss"];
  }
  const steps = [...Array(13).keys()].map((i) => scale.low + ((scale.high - scale.low) * i) / 12);
  const bar = make("span", { class: "bar", role: "img", "aria-label": `colours from ${paint.label} low to high` });
  bar.style.background = `linear-gradient(90deg, ${steps.map((v) => css(colourOf(paint, scale, v))).join(", ")})`;
  const label = (text) => make("span", { class: "num" }, text);
  if (paint.scale !== "ratio") return [label(show(scale.low)), bar, label(show(scale.high)), "scale of this episode"];
  const [below, above] = clipRange(group);
  for (const edge of [below, above].filter(Number.isFinite)) {
    const mark = make("b");
    mark.style.left = `${(100 * (Math.log(edge) - scale.low)) / (scale.high - scale.low)}%`;
    bar.append(mark);
  }
  const words = `marks: clip range ${show(below)} to ${show(above)}; 1 = unchanged; underlined: clipped`;
  return [label(`≤ ${show(Math.exp(scale.low))}`), bar, label(`≥ ${show(Math.exp(scale.high))}`), words];
}
