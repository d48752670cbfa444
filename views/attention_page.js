"use strict";
// Draws the attention page from the JSON beside it. `T` tokens; `weights[layer]` holds the lower triangles of all heads.
const data = JSON.parse(document.getElementById("data").textContent);
const T = data.tokens.length, FULL = 65535, TRIANGLE = (T * (T + 1)) / 2;
const THUMBNAIL = 64, WIDEST_LABEL = 96, SMALLEST_LABEL = 9, LARGEST_CELL = 28, LARGEST_MAP = 6000;
const element = (id) => document.getElementById(id);
const state = { layer: 0, head: 0, token: T - 1, column: -1, cell: 0, labels: 0 };
const family = getComputedStyle(document.body).fontFamily;
const weights = [], pixels = document.createElement("canvas");

async function unpack(text) {
  const bytes = Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  const view = new DataView(await new Response(stream).arrayBuffer());
  return Uint16Array.from({ length: view.byteLength / 2 }, (_, i) => view.getUint16(2 * i, true));
}

function weight(layer, head, row, column) {
  return column > row ? 0 : weights[layer][head * TRIANGLE + (row * (row + 1)) / 2 + column] / FULL;
}

function rowOf(layer, head, row) {
  return Array.from({ length: row + 1 }, (_, column) => weight(layer, head, row, column));
}

function colours() {
  const style = getComputedStyle(document.documentElement);
  const name = (variable) => style.getPropertyValue(variable).trim();
  const hex = name("--card").replace("#", "").replace(/^(.)(.)(.)$/, "$1$1$2$2$3$3");
  return {
    paper: [0, 2, 4].map((i) => parseInt(hex.slice(i, i + 2), 16)),
    accent: name("--accent").split(" ").map(Number),
    ink: name("--ink"), dim: name("--dim"),
  };
}

// One pixel a pair of tokens; with `size` below T, one a block of pairs, as strong as its strongest.
function drawPixels(canvas, layer, head, size) {
  const { paper, accent } = colours(), strengths = new Float32Array(size * size);
  for (let row = 0; row < T; row++) {
    const values = rowOf(layer, head, row), largest = Math.max(...values) || 1;
    const y = Math.floor((row * size) / T);
    values.forEach((value, column) => {
      const place = y * size + Math.floor((column * size) / T);
      strengths[place] = Math.max(strengths[place], value / largest);
    });
  }
  const image = new ImageData(size, size);
  strengths.forEach((strength, place) => {
    for (let i = 0; i < 3; i++) image.data[4 * place + i] = paper[i] + (accent[i] - paper[i]) * strength;
    image.data[4 * place + 3] = 255;
  });
  canvas.width = canvas.height = size;
  canvas.getContext("2d").putImageData(image, 0, 0);
}

function drawMap() {
  state.labels = roomForLabels();
  const canvas = element("map"), { cell, labels } = state, size = labels + cell * T, ratio = Math.min(2, window.devicePixelRatio || 1);
  const wanted = `${state.layer} ${state.head} ${colours().paper}`;
  if (pixels.dataset.shows !== wanted) {
    drawPixels(pixels, state.layer, state.head, T);
    pixels.dataset.shows = wanted;
  }
  canvas.style.width = canvas.style.height = `${size}px`;
  canvas.width = canvas.height = size * ratio;
  const context = canvas.getContext("2d"), { ink, dim } = colours();
  context.scale(ratio, ratio);
  context.imageSmoothingEnabled = false;
  context.drawImage(pixels, labels, labels, cell * T, cell * T);
  const font = fontSize(), every = Math.ceil((font + 1) / cell);
  context.textBaseline = "middle";
  context.textAlign = "right";
  const label = (token, x, y, chosen) => {
    context.font = `${chosen ? "bold " : ""}${font}px ${family}`;
    context.fillStyle = chosen ? ink : dim;
    context.fillText(shortened(data.tokens[token].label), x, y, labels - 6);
  };
  // Where labels are too tight for every token, those of the chosen row and column push their neighbours out.
  const labelled = (chosen) => [...Array(T).keys()].filter(
    (token) => token === chosen || (token % every === 0 && (chosen < 0 || Math.abs(token - chosen) >= every)));
  for (const row of labelled(state.token)) label(row, labels - 4, labels + (row + 0.5) * cell, row === state.token);
  context.save();
  context.rotate(Math.PI / 2);
  for (const column of labelled(state.column)) label(column, labels - 4, -(labels + (column + 0.5) * cell), column === state.column);
  context.restore();
  context.strokeStyle = ink;
  context.strokeRect(labels, labels + state.token * cell, (state.token + 1) * cell, cell);
  element("map-title").textContent = `Layer ${state.layer + 1}, head ${state.head + 1}`;
}

function fontSize() {
  return Math.max(SMALLEST_LABEL, Math.min(13, state.cell));
}

function roomForLabels() {
  const context = element("map").getContext("2d");
  context.font = `bold ${fontSize()}px ${family}`;
  const widths = data.tokens.map((token) => context.measureText(shortened(token.label)).width);
  return Math.ceil(Math.min(WIDEST_LABEL, 10 + Math.max(...widths)));
}

function shortened(text) {
  const characters = Array.from(text);
  return characters.length > 14 ? characters.slice(0, 13).join("") + "…" : text;
}

function shadeText() {
  const bySurprise = document.querySelector("input[name=shade]:checked").value === "surprise";
  const values = rowOf(state.layer, state.head, state.token), largest = Math.max(...values) || 1;
  const most = Math.max(1, ...data.surprises.filter((bits) => bits !== null));
  document.querySelectorAll(".token").forEach((span, token) => {
    const bits = data.surprises[token], value = token <= state.token ? values[token] : 0;
    const strength = bySurprise ? (bits ?? 0) / most : value / largest;
    span.style.background = `rgb(var(${bySurprise ? "--surprise" : "--accent"}) / ${(0.75 * strength).toFixed(3)})`;
    span.setAttribute("aria-selected", token === state.token);
    span.tabIndex = token === state.token ? 0 : -1;
    span.title = `${data.tokens[token].label}: ` + (bySurprise ? surpriseOf(token) : `weight ${value.toFixed(4)}`);
    if (!bySurprise && value >= 0.05) span.dataset.percent = (100 * value).toFixed(0);
    else delete span.dataset.percent;
  });
}

function surpriseOf(token) {
  const bits = data.surprises[token];
  return bits === null ? "nothing came before it" : `surprise ${bits.toFixed(2)} bits, probability ${(100 * 2 ** -bits).toPrecision(3)}%`;
}

function listAttended() {
  const values = rowOf(state.layer, state.head, state.token);
  const order = [...values.keys()].sort((a, b) => values[b] - values[a] || a - b).slice(0, 8);
  element("chosen").textContent =
    `Token ${state.token + 1}, “${data.tokens[state.token].label}”: ${surpriseOf(state.token)}. It attends to:`;
  element("attended").replaceChildren(...order.map((token) => {
    const line = document.createElement("li"), bar = document.createElement("i");
    const [name, share] = [data.tokens[token].label, values[token].toFixed(4)].map((text) => {
      const span = document.createElement("span");
      span.textContent = text;
      return span;
    });
    bar.style.width = `${100 * values[token]}%`;
    line.append(name, share, bar);
    return line;
  }));
}

function choose(change) {
  Object.assign(state, { column: -1 }, change);
  shadeText();
  listAttended();
  drawMap();
  document.querySelectorAll("#heads button").forEach((button, i) => {
    const chosen = i === state.layer * data.heads + state.head;
    button.setAttribute("aria-checked", chosen);
    button.tabIndex = chosen ? 0 : -1;
  });
}

const MOVES = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };

// Arrow keys, Home and End move the focus among items that lie `across` in a row; focusing one chooses it.
function movable(container, across) {
  container.addEventListener("keydown", (event) => {
    const items = [...container.querySelectorAll("[role=option], [role=radio]")], here = items.indexOf(document.activeElement);
    const move = MOVES[event.key];
    let to = event.key === "Home" ? 0 : event.key === "End" ? items.length - 1 : move ? here + move[0] * across + move[1] : -1;
    if (here < 0 || to < 0 || to >= items.length) return;
    event.preventDefault();
    items[to].focus();
  });
}

function buildText() {
  data.tokens.forEach((token, i) => {
    const span = document.createElement("span");
    span.className = token.text ? "token" : "token piece";
    span.setAttribute("role", "option");
    span.setAttribute("aria-label", token.label);
    span.textContent = token.text || (token.part ? "·" : token.label);
    for (const kind of ["pointerenter", "focus", "click"]) span.addEventListener(kind, () => state.token === i || choose({ token: i }));
    element("text").append(span);
  });
  movable(element("text"), 1);
}

function buildHeads() {
  const grid = element("heads");
  grid.style.gridTemplateColumns = `max-content repeat(${data.heads}, minmax(28px, 72px))`;
  grid.append(document.createElement("span"), ...Array.from({ length: data.heads }, (_, head) => numbered(head)));
  data.layers.forEach((_, layer) => {
    grid.append(numbered(layer));
    for (let head = 0; head < data.heads; head++) {
      const button = document.createElement("button"), canvas = document.createElement("canvas");
      button.setAttribute("role", "radio");
      button.setAttribute("aria-label", `layer ${layer + 1}, head ${head + 1}`);
      for (const kind of ["focus", "click"]) {
        button.addEventListener(kind, () => (state.layer === layer && state.head === head) || choose({ layer, head }));
      }
      button.append(canvas);
      grid.append(button);
    }
  });
  movable(grid, data.heads);
}

function numbered(index) {
  const span = document.createElement("span");
  span.textContent = index + 1;
  return span;
}

function drawThumbnails() {
  document.querySelectorAll("#heads canvas").forEach((canvas, i) =>
    drawPixels(canvas, Math.floor(i / data.heads), i % data.heads, Math.min(T, THUMBNAIL)));
}

function zoom(factor) {
  const largest = Math.max(1, Math.min(LARGEST_CELL, Math.floor(LARGEST_MAP / T)));
  state.cell = Math.max(1, Math.min(largest, Math.round(state.cell * factor)));
  drawMap();
}

function buildMap() {
  state.cell = Math.max(1, Math.min(LARGEST_CELL, Math.floor((element("frame").clientWidth - WIDEST_LABEL) / T)));
  element("smaller").addEventListener("click", () => zoom(1 / 1.5));
  element("larger").addEventListener("click", () => zoom(1.5));
  const pointed = (event) => {
    const [row, column] = [event.offsetY, event.offsetX].map((at) => Math.floor((at - state.labels) / state.cell));
    if (row < 0 || row >= T || column < 0 || column > row || (row === state.token && column === state.column)) return;
    choose({ token: row, column });
    element("pair").textContent = `“${data.tokens[row].label}” attends to “${data.tokens[column].label}” with weight ` +
      weight(state.layer, state.head, row, column).toFixed(4);
  };
  for (const kind of ["pointermove", "click"]) element("map").addEventListener(kind, pointed);
}

async function begin() {
  if (typeof DecompressionStream === "undefined") throw new Error("this browser is too old to unpack the weights");
  weights.push(...(await Promise.all(data.layers.map(unpack))));
  buildText();
  buildHeads();
  buildMap();
  drawThumbnails();
  choose({});
  document.querySelectorAll("input[name=shade]").forEach((input) => input.addEventListener("change", shadeText));
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { drawThumbnails(); choose({}); });
  document.documentElement.dataset.ready = "true";
}

begin().catch((error) => {
  element("problem").hidden = false;
  element("problem").textContent = `The page cannot be drawn: ${error.message}`;
});
