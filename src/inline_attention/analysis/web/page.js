// The page: pictures in, classes and weights out, and the time that larger pictures take.
"use strict";
const settings = JSON.parse(document.getElementById("settings").textContent);
const part = (id) => document.getElementById(id);
const create = (name, properties = {}, ...children) => {
  const element = Object.assign(document.createElement(name), properties);
  element.append(...children);
  return element;
};
const decimals = (value, digits) => value.toFixed(digits).replace("-", "−");
const inWords = (milliseconds) =>
  milliseconds < 10 ? `${decimals(milliseconds, 1)} ms`
  : milliseconds < 1000 ? `${decimals(milliseconds, 0)} ms`
  : `${decimals(milliseconds / 1000, milliseconds < 10000 ? 1 : 0)} s`;

// Files of the folder. Each calls `deliver`: scripts are all that a page opened from a disk may load.
const delivered = new Map(), loading = new Map();
function deliver(name, content) {
  delivered.set(name, content);
}
function loadFile(name) {
  if (!loading.has(name)) {
    loading.set(name, new Promise((resolve, reject) => {
      const script = create("script", { src: `data/${name}.js`, onload: resolve });
      script.onerror = () => {
        loading.delete(name);
        reject(new Error(`the file data/${name}.js is missing or broken; keep the folder together`));
      };
      document.head.append(script);
    }));
  }
  return loading.get(name);
}
async function bytesOf(name) {
  const text = atob(delivered.get(name));
  const packed = new Uint8Array(text.length);
  for (let index = 0; index < text.length; index++) packed[index] = text.charCodeAt(index);
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

// A thread that runs models.
class Engine {
  constructor() {
    const address = URL.createObjectURL(new Blob([part("worker").textContent], { type: "text/javascript" }));
    this.worker = new Worker(address);
    this.waiting = new Map();
    this.count = 0;
    this.worker.onmessage = ({ data: { number, result, error } }) => {
      const { resolve, reject } = this.waiting.get(number);
      this.waiting.delete(number);
      if (error === undefined) resolve(result);
      else reject(new Error(error));
    };
    this.worker.onerror = (event) => this.end(new Error(event.message || "the thread of the model stopped"));
  }
  ask(task, content) {
    return new Promise((resolve, reject) => {
      this.waiting.set(++this.count, { resolve, reject });
      this.worker.postMessage({ number: this.count, task, content });
    });
  }
  end(reason) {
    this.worker.terminate();
    for (const { reject } of this.waiting.values()) reject(reason);
    this.waiting.clear();
  }
  static async open(file, name) {
    await Promise.all([loadFile("runtime"), loadFile("model"), loadFile(file)]);
    const engine = new Engine();
    const [source, binary] = await Promise.all([bytesOf("runtime.mjs"), bytesOf("runtime.wasm")]);
    await engine.ask("start", { source, binary });
    await engine.ask("open", { name, graph: await bytesOf(name), weights: await bytesOf("weights") });
    return engine;
  }
}

const state = {
  pixels: null, // the picture as it was given
  shown: null, // the picture as the model sees it
  outputs: null, // of the last run
  token: null, // row and column
  isBusy: false,
  next: null, // picture that came meanwhile
  example: -1,
};
let model;

function fail(error) {
  part("status").textContent = `Error: ${error.message}`;
  part("status").classList.add("bad");
}

async function classify(pixels) {
  if (state.isBusy) {
    state.next = pixels;
    return;
  }
  state.isBusy = true;
  try {
    const shown = fit(pixels, settings.size, settings.preparation);
    const shape = [1, 3, ...settings.size];
    const engine = await model;
    const values = normalize(shown, settings.preparation);
    const { outputs, milliseconds } = await engine.ask("run", { name: "model", values, shape, repeat: false });
    Object.assign(state, { pixels, shown, outputs });
    part("status").classList.remove("bad");
    part("status").textContent = `${inWords(milliseconds)} for this picture, ${settings.size[1]}×${settings.size[0]} pixels`;
    showClasses(outputs.scores.values);
    showPicture();
  } catch (error) {
    fail(error);
  } finally {
    state.isBusy = false;
    const next = state.next;
    state.next = null;
    if (next) await classify(next);
  }
}

function showClasses(scores) {
  const largest = scores.reduce((most, score) => Math.max(most, score));
  const powers = Array.from(scores, (score) => Math.exp(score - largest));
  const sum = powers.reduce((total, power) => total + power);
  const order = Array.from(scores.keys()).sort((a, b) => scores[b] - scores[a]).slice(0, settings.most_classes);
  const list = part("classes");
  const rows = order.map((index, rank) => {
    const percent = (100 * powers[index]) / sum;
    const row = list.children[rank] ?? list.appendChild(create(
      "li", {}, create("span", { className: "name" }), create("span", { className: "percent" }),
      create("span", { className: "track" }, create("i")),
    ));
    row.querySelector(".name").textContent = settings.class_names[index];
    row.querySelector(".percent").textContent = `${decimals(percent, 1)} %`;
    row.querySelector("i").style.width = `${percent}%`;
    row.querySelector(".track").setAttribute("aria-hidden", "true");
    return row;
  });
  while (list.children.length > rows.length) list.lastChild.remove();
  list.dataset.scores = JSON.stringify(Array.from(scores));
}

// The weights of a query for all keys in multiples of the uniform weight: (score − mean score + 1), averaged over heads.
function timesUniform(number, query, head) {
  const q = state.outputs[`queries${number}`], k = state.outputs[`keys${number}`];
  const [, tokens, heads, dim] = q.shape;
  const chosen = head === null ? [...Array(heads).keys()] : [head];
  const result = new Float64Array(tokens);
  for (const h of chosen) {
    const scores = new Float64Array(tokens);
    let sum = 0;
    for (let key = 0; key < tokens; key++) {
      const [a, b] = [(query * heads + h) * dim, (key * heads + h) * dim];
      for (let d = 0; d < dim; d++) scores[key] += q.values[a + d] * k.values[b + d];
      sum += scores[key];
    }
    for (let key = 0; key < tokens; key++) result[key] += (scores[key] - sum / tokens + 1) / chosen.length;
  }
  return result;
}

const view = part("picture");
const layer = () => settings.layers[Number(part("layer").value)];
function showPicture() {
  if (!state.shown) return;
  const { width, height, values } = state.shown;
  const scale = 512 / Math.max(width, height);
  [view.width, view.height] = [width * scale, height * scale].map(Math.round);
  const small = create("canvas", { width, height });
  const image = new ImageData(width, height);
  for (let place = 0; place < width * height; place++) {
    image.data.set(values.subarray(place * 3, place * 3 + 3), place * 4);
    image.data[place * 4 + 3] = 255;
  }
  small.getContext("2d").putImageData(image, 0, 0);
  const context = view.getContext("2d");
  context.imageSmoothingEnabled = Math.max(width, height) > 100;
  const isCovered = state.token !== null && settings.layers.length > 0;
  if (isCovered) Object.assign(context, { filter: "grayscale(1)", globalAlpha: 0.3 });
  context.drawImage(small, 0, 0, view.width, view.height);
  Object.assign(context, { filter: "none", globalAlpha: 1 });
  part("empty").hidden = true;
  view.setAttribute("aria-label", settings.layers.length
    ? "Picture; the arrow keys choose a token, Escape shows the picture only" : "Picture as the model sees it");
  part("clear").disabled = !isCovered;
  part("scale").hidden = !isCovered;
  if (isCovered) showWeights(context);
  else {
    delete view.dataset.weights;
    if (settings.layers.length) part("token").textContent = "Click the picture to choose a token, or focus it and press an arrow key.";
  }
}

function showWeights(context) {
  const { rows, columns, prefix } = layer(), [row, column] = state.token;
  const chosen = part("head").value;
  const number = Number(part("layer").value);
  const weights = timesUniform(number, prefix + row * columns + column, chosen === "" ? null : Number(chosen));
  const grid = weights.subarray(prefix);
  const low = grid.reduce((least, weight) => Math.min(least, weight)), high = grid.reduce((most, weight) => Math.max(most, weight));
  const limit = Math.max(1e-9, high - 1, 1 - low);
  const style = getComputedStyle(document.documentElement);
  const [more, less, ink, paper] = ["more", "less", "ink", "paper"].map((name) => style.getPropertyValue(`--${name}`).trim());
  const edge = (index, count, side) => Math.round((index * side) / count); // no gaps between tokens
  const box = (r, c) => [edge(c, columns, view.width), edge(r, rows, view.height), edge(c + 1, columns, view.width), edge(r + 1, rows, view.height)];
  grid.forEach((weight, index) => {
    const [left, top, right, bottom] = box(Math.floor(index / columns), index % columns);
    context.globalAlpha = (0.9 * Math.abs(weight - 1)) / limit;
    context.fillStyle = weight > 1 ? more : less;
    context.fillRect(left, top, right - left, bottom - top);
  });
  context.globalAlpha = 1;
  const [left, top, right, bottom] = box(row, column);
  for (const [color, line] of [[paper, 7], [ink, 3]]) {
    Object.assign(context, { strokeStyle: color, lineWidth: line });
    context.strokeRect(left, top, right - left, bottom - top);
  }
  const outside = Array.from(weights.subarray(0, prefix), (weight) => decimals(weight, 2)).join(", ");
  const others = prefix ? ` ${prefix > 1 ? "Tokens outside of the picture" : "Class token"}: ${outside}.` : "";
  part("scale-low").textContent = `${decimals(1 - limit, 2)}×`;
  part("scale-high").textContent = `${decimals(1 + limit, 2)}×`;
  part("token").textContent = `Row ${row + 1}, column ${column + 1} of ${rows}×${columns}: weights from ${
    decimals(low, 2)} to ${decimals(high, 2)} times the uniform weight.${others}`;
  view.dataset.weights = JSON.stringify(Array.from(weights, (weight) => weight / weights.length));
}

function chooseToken(row, column) {
  if (!state.shown || !settings.layers.length) return;
  const { rows, columns } = layer();
  state.token = [Math.min(rows - 1, Math.max(0, row)), Math.min(columns - 1, Math.max(0, column))];
  showPicture();
}

function setUpWeights() {
  part("weights-panel").hidden = settings.layers.length === 0;
  part("weights-note").textContent = settings.weights_note;
  if (settings.layers.length === 0) {
    document.querySelector(".frame").classList.add("plain");
    return;
  }
  view.tabIndex = 0;
  view.setAttribute("role", "application");
  settings.layers.forEach(({ name }, index) => part("layer").append(create("option", { value: index, textContent: name })));
  part("layer").value = settings.layers.length - 1;
  const showHeads = () => {
    const { heads } = layer(), kept = part("head").value;
    const names = [["", `mean of ${heads}`], ...Array.from({ length: heads }, (_, index) => [index, `${index + 1}`])];
    part("head").replaceChildren(...names.map(([value, textContent]) => create("option", { value, textContent })));
    part("head").value = Number(kept) < heads ? kept : "";
  };
  showHeads();
  part("layer").addEventListener("change", () => {
    const before = settings.layers[setUpWeights.layer];
    setUpWeights.layer = Number(part("layer").value);
    showHeads();
    if (state.token) {
      const [row, column] = state.token, { rows, columns } = layer();
      chooseToken(Math.floor(((row + 0.5) * rows) / before.rows), Math.floor(((column + 0.5) * columns) / before.columns));
    }
  });
  setUpWeights.layer = Number(part("layer").value);
  part("head").addEventListener("change", showPicture);
  const clear = () => {
    state.token = null;
    showPicture();
  };
  part("clear").addEventListener("click", clear);
  view.addEventListener("click", (event) => {
    const box = view.getBoundingClientRect(), { rows, columns } = layer();
    chooseToken(
      Math.floor(((event.clientY - box.top) / box.height) * rows), Math.floor(((event.clientX - box.left) / box.width) * columns),
    );
  });
  view.addEventListener("keydown", (event) => {
    const { rows, columns } = layer();
    const [row, column] = state.token ?? [rows >> 1, columns >> 1];
    const moves = {
      ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0], Home: [-rows, -columns], End: [rows, columns],
      Enter: [0, 0], " ": [0, 0],
    };
    if (event.key === "Escape") clear();
    else if (event.key in moves) {
      event.preventDefault(); // the page would scroll
      const [down, right] = state.token ? moves[event.key] : [0, 0]; // the first key shows where the token is
      chooseToken(row + down, column + right);
    }
  });
}

// Pictures: from a file, the clipboard, an example or the camera.
async function openPicture(blob) {
  let bitmap;
  try {
    bitmap = await createImageBitmap(blob, { imageOrientation: "from-image", colorSpaceConversion: "none" });
  } catch {
    fail(new Error("this file is no picture that the browser can read; choose a JPEG, PNG or WebP file"));
    return;
  }
  const pixels = readPixels(bitmap, bitmap.width, bitmap.height);
  bitmap.close();
  await classify(pixels);
}
function markExample(number) {
  state.example = number;
  [...part("examples").children].forEach((button, index) => button.setAttribute("aria-pressed", String(index === number)));
}
function takeFile(file) {
  if (!file) return;
  stopCamera();
  markExample(-1);
  return openPicture(file);
}
function openExample(number) {
  stopCamera();
  markExample(number);
  const [head, body] = settings.examples[number].address.split(",");
  const bytes = Uint8Array.from(atob(body), (character) => character.charCodeAt(0));
  return openPicture(new Blob([bytes], { type: head.slice(5, head.indexOf(";")) }));
}

let stream = null;
function stopCamera() {
  stream?.getTracks().forEach((track) => track.stop());
  stream = null;
  part("video").srcObject = null;
  part("video").hidden = true;
  part("camera").textContent = "Use the camera";
}
async function startCamera() {
  const video = part("video");
  try {
    stream = await navigator.mediaDevices.getUserMedia({ video: { facingMode: "environment" } });
  } catch (error) {
    fail(new Error(`the camera cannot be used (${error.message}); allow it in the browser, or choose a picture`));
    return;
  }
  markExample(-1);
  part("camera").textContent = "Stop the camera";
  video.hidden = false;
  video.srcObject = stream;
  await video.play();
  const own = stream;
  while (stream === own) {
    if (video.videoWidth) await classify(readPixels(video, video.videoWidth, video.videoHeight));
    await new Promise((resolve) => requestAnimationFrame(resolve));
  }
}

function setUpPictures() {
  settings.examples.forEach(({ name, address, is_small }, number) => {
    const image = create("img", { src: address, alt: "", className: is_small ? "" : "fine" });
    const button = create("button", { type: "button", onclick: () => openExample(number) }, image);
    button.setAttribute("aria-label", `Example ${number + 1}: ${name}`);
    button.setAttribute("aria-pressed", "false");
    part("examples").append(button);
  });
  part("choose").addEventListener("click", () => part("file").click());
  part("file").addEventListener("change", () => {
    takeFile(part("file").files[0]);
    part("file").value = ""; // the same file may be chosen again
  });
  part("camera").hidden = !navigator.mediaDevices?.getUserMedia;
  part("camera").addEventListener("click", () => (stream ? stopCamera() : startCamera()));
  addEventListener("paste", (event) => takeFile([...event.clipboardData.files].find((file) => file.type.startsWith("image/"))));
  addEventListener("dragover", (event) => {
    event.preventDefault();
    document.body.classList.add("dropping");
  });
  addEventListener("dragleave", (event) => {
    if (!event.relatedTarget) document.body.classList.remove("dropping");
  });
  addEventListener("drop", (event) => {
    event.preventDefault(); // the browser would open the file
    document.body.classList.remove("dropping");
    takeFile(event.dataTransfer.files[0]);
  });
}

// The cost of larger pictures.
const engines = new Map(), times = new Map(); // by kind; milliseconds, or a sentence, by kind and stop
let measuring = 0; // number of the measurement in progress, 0 for none
const timeKey = (kind, stop) => `${kind} ${stop}`;
const gibibytes = (bytes) => {
  const value = bytes / 2 ** 30;
  return `${value < 100 ? decimals(value, 1) : Math.round(value).toLocaleString("en")} GiB`;
};

async function measureKind({ kind, label, graph }, stop, number) {
  const { size, softmax_bytes } = settings.cost.stops[stop];
  if (kind === "softmax" && softmax_bytes > settings.cost.most_bytes)
    return `softmax needs ${gibibytes(softmax_bytes)} for its weights here`;
  part("cost-status").textContent = `${label} runs on ${size[1]}×${size[0]} pixels…`;
  if (!engines.has(kind)) engines.set(kind, Engine.open("cost", graph));
  try {
    const engine = await engines.get(kind);
    if (number !== measuring) return null;
    const source = state.pixels ?? { width: 1, height: 1, values: new Uint8ClampedArray(3) };
    const values = normalize(fit(source, size, settings.preparation), settings.preparation);
    const { milliseconds } = await engine.ask("run", { name: graph, values, shape: [1, 3, ...size], wanted: ["scores"], repeat: true });
    return milliseconds;
  } catch (error) {
    endEngine(kind, error);
    if (number !== measuring) return null;
    return `${label} could not run here: ${error.message}`;
  }
}
function endEngine(kind, reason) {
  engines.get(kind)?.then((engine) => engine.end(reason), () => {});
  engines.delete(kind);
}

async function measure() {
  const stop = Number(part("size").value), number = ++measure.count;
  measuring = number;
  part("measure").disabled = true;
  part("cancel").disabled = false;
  for (const item of settings.cost.kinds) {
    if (typeof times.get(timeKey(item.kind, stop)) === "number") continue;
    const time = await measureKind(item, stop, number);
    if (number !== measuring) return; // canceled
    times.set(timeKey(item.kind, stop), time);
    showTimes();
  }
  const found = settings.cost.kinds.map(({ kind, label }) => {
    const time = times.get(timeKey(kind, stop));
    return typeof time === "number" ? `${label} ${inWords(time)}` : time;
  });
  finishMeasuring(`${settings.cost.stops[stop].tokens.toLocaleString("en")} tokens: ${found.join("; ")}.`);
}
measure.count = 0;
function finishMeasuring(sentence) {
  measuring = 0;
  part("measure").disabled = false;
  part("cancel").disabled = true;
  part("cost-status").textContent = sentence;
}
function cancel() {
  if (!measuring) return;
  for (const kind of [...engines.keys()]) endEngine(kind, new Error("canceled"));
  finishMeasuring("Canceled.");
}

function showTimes() {
  const { kinds, stops } = settings.cost;
  const rows = [...stops.keys()].filter((stop) => kinds.some(({ kind }) => times.has(timeKey(kind, stop))));
  part("times").replaceChildren(...rows.map((stop) => {
    const { size, tokens } = stops[stop];
    const cells = kinds.map(({ kind }) => {
      const time = times.get(timeKey(kind, stop));
      return create("td", { className: typeof time === "number" ? "number" : "", textContent: typeof time === "number" ? inWords(time) : time ?? "…" });
    });
    const head = create("th", { scope: "row", textContent: `${size[1]}×${size[0]}` });
    return create("tr", {}, head, create("td", { textContent: tokens.toLocaleString("en") }), ...cells);
  }));
  part("cost").dataset.times = JSON.stringify(Object.fromEntries(times));
  drawChart();
}

const MARKERS = {
  softmax: (x, y) => `M${x - 4.5},${y - 4.5}h9v9h-9z`,
  linear: (x, y) => `M${x},${y - 5}L${x - 5},${y + 4.2}h10z`,
  inline: (x, y) => `M${x - 4.8},${y}a4.8,4.8 0 1 0 9.6,0a4.8,4.8 0 1 0 -9.6,0z`,
};
function svgElement(name, attributes, text = "") {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.textContent = text;
  return element;
}
function drawChart() {
  const { kinds, stops } = settings.cost;
  const [left, right, top, bottom] = [58, 428, 10, 250];
  const known = [...times.values()].filter((time) => typeof time === "number");
  const low = 10 ** Math.floor(Math.log10(Math.max(0.1, Math.min(10, ...known))));
  const high = Math.max(1000 * low, 10 ** Math.ceil(Math.log10(Math.max(...known, 1))));
  const [least, most] = [stops[0].tokens / 1.3, stops.at(-1).tokens * 1.3].map(Math.log);
  const across = (tokens) => left + ((right - left) * (Math.log(tokens) - least)) / (most - least);
  const down = (time) => bottom - ((bottom - top) * Math.log(time / low)) / Math.log(high / low);
  const shapes = [];
  for (let tick = low; tick <= high * 1.001; tick *= 10) {
    shapes.push(svgElement("line", { x1: left, x2: right, y1: down(tick), y2: down(tick), class: "grid" }));
    const text = tick < 1000 ? `${+tick.toPrecision(1)} ms` : `${Math.round(tick / 1000).toLocaleString("en")} s`;
    shapes.push(svgElement("text", { x: left - 8, y: down(tick) + 4, "text-anchor": "end" }, text));
  }
  for (const { tokens } of stops) {
    const text = tokens < 10000 ? tokens.toLocaleString("en") : `${Math.round(tokens / 1000)}k`;
    shapes.push(svgElement("text", { x: across(tokens), y: bottom + 18, "text-anchor": "middle" }, text));
  }
  shapes.push(svgElement("text", { x: (left + right) / 2, y: bottom + 37, "text-anchor": "middle" }, "tokens"));
  const descriptions = [];
  for (const { kind, label } of kinds) {
    const points = [...stops.keys()].filter((stop) => typeof times.get(timeKey(kind, stop)) === "number")
      .map((stop) => [stops[stop].tokens, times.get(timeKey(kind, stop))]);
    const places = points.map(([tokens, time]) => [across(tokens), down(time)]);
    const group = svgElement("g", { class: `k-${kind}` });
    group.append(svgElement("path", { class: "line", d: places.map(([x, y], index) => `${index ? "L" : "M"}${x},${y}`).join("") }));
    for (const [x, y] of places) group.append(svgElement("path", { class: "marker", d: (MARKERS[kind] ?? MARKERS.inline)(x, y) }));
    shapes.push(group);
    if (points.length) descriptions.push(`${label}: ${points.map(([tokens, time]) => `${inWords(time)} for ${tokens} tokens`).join(", ")}`);
  }
  part("chart").replaceChildren(...shapes);
  part("chart").setAttribute("aria-label", descriptions.join(". ") || "No times yet");
}

function setUpCost() {
  part("cost-note").textContent = settings.cost_note;
  part("cost-panel").hidden = settings.cost === null;
  if (settings.cost === null) return;
  const { kinds, stops } = settings.cost;
  part("times-head").replaceChildren(
    ...["size", "tokens", ...kinds.map(({ label }) => label)].map((textContent) => create("th", { scope: "col", textContent })),
  );
  for (const { kind, label } of kinds) {
    const drawing = svgElement("svg", { viewBox: "0 0 28 14", width: 28, height: 14, "aria-hidden": "true", class: `k-${kind}` });
    drawing.append(svgElement("path", { d: "M1,7h26", class: "line" }), svgElement("path", { d: (MARKERS[kind] ?? MARKERS.inline)(14, 7), class: "marker" }));
    part("legend").append(create("li", {}, drawing, create("span", { textContent: label })));
  }
  const slider = part("size");
  slider.max = stops.length - 1;
  const show = () => {
    const { size, tokens } = stops[slider.value];
    part("size-text").textContent = `${size[1]}×${size[0]}, ${tokens.toLocaleString("en")} tokens`;
    slider.setAttribute("aria-valuetext", part("size-text").textContent);
  };
  slider.addEventListener("input", show);
  let waiting = 0;
  slider.addEventListener("change", () => {
    clearTimeout(waiting); // the arrow keys change it several times
    waiting = setTimeout(() => {
      cancel();
      measure();
    }, 300);
  });
  part("measure").addEventListener("click", measure);
  part("cancel").addEventListener("click", cancel);
  show();
  drawChart();
}

setUpWeights();
setUpPictures();
setUpCost();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", showPicture);
async function openModel() {
  const engine = await Engine.open("model", "model");
  const shape = [1, 3, ...settings.size];
  const values = new Float32Array(3 * settings.size[0] * settings.size[1]);
  await engine.ask("run", { name: "model", values, shape, repeat: false }); // the first run takes longer
  return engine;
}
model = openModel();
model.then(() => {
  document.body.dataset.ready = "true";
  if (!state.pixels && !state.isBusy) part("status").textContent = "Ready. Choose a picture.";
}, fail);
if (settings.examples.length) openExample(0);
