// The plane in which a query can be dragged, and the weights that three attentions give to six keys.
"use strict";
(() => {
  const part = (name) => document.getElementById(`plane-${name}`);
  const settings = JSON.parse(part("settings").textContent);
  const SIZE = 300, LOW = -1.5, HIGH = 3.5; // pixels of the drawing, ends of both axes
  const SCALE = Math.SQRT1_2; // d ** -0.5 with d = 2
  const STEP = 0.1, LARGE_STEP = 0.5;
  const LARGEST_BAR = 1, SMALLEST_BAR = -0.5; // weights beyond are cut off, with a mark
  const [drawing, handle, slider] = ["drawing", "query", "ghost"].map(part);
  const state = { query: [...settings.query], factor: Number(slider.value), map: "relu" };

  const svg = (name, attributes, content = "") => {
    const pairs = Object.entries(attributes).map(([key, value]) => `${key}="${value}"`);
    return `<${name} ${pairs.join(" ")}>${content}</${name}>`;
  };
  const across = (x) => (SIZE * (x - LOW)) / (HIGH - LOW);
  const down = (y) => SIZE - across(y);
  const dot = (a, b) => a[0] * b[0] + a[1] * b[1];
  const sum = (values) => values.reduce((total, value) => total + value, 0);
  const maps = { relu: (x) => x.map((value) => Math.max(value, 0)), identity: (x) => x };

  const attentions = {
    softmax(scores) {
      const powers = scores.map((score) => Math.exp(score - Math.max(...scores)));
      return powers.map((power) => power / sum(powers));
    },
    linear(scores) {
      const isDivisible = Math.abs(sum(scores) / scores.length) > settings.smallest;
      return scores.map((score) => (isDivisible ? score / sum(scores) : 1 / scores.length));
    },
    inline: (scores) => scores.map((score) => (score - sum(scores) / scores.length + 1) / scores.length),
  };
  function weigh(kind, query) {
    const phi = kind === "softmax" ? maps.identity : maps[state.map];
    return attentions[kind](settings.keys.map((key) => SCALE * dot(phi(query), phi(key))));
  }

  function drawStill(ghost) {
    const shapes = [];
    for (let value = Math.ceil(LOW); value <= HIGH; value++) {
      const axis = value === 0 ? "base" : "grid";
      shapes.push(svg("line", { x1: across(value), x2: across(value), y1: 0, y2: SIZE, class: axis }));
      shapes.push(svg("line", { x1: 0, x2: SIZE, y1: down(value), y2: down(value), class: axis }));
    }
    const far = 20 / Math.max(1e-6, Math.hypot(...state.query));
    const [x, y] = state.query.map((value) => far * value);
    shapes.push(svg("line", { x1: across(0), y1: down(0), x2: across(x), y2: down(y), class: "ray" }));
    settings.keys.forEach((key, index) => {
      shapes.push(svg("rect", { x: across(key[0]) - 5, y: down(key[1]) - 5, width: 10, height: 10, class: "key" }));
      shapes.push(svg("text", { x: across(key[0]) + 9, y: down(key[1]) + 4 }, `k${index + 1}`));
    });
    shapes.push(svg("circle", { cx: across(ghost[0]), cy: down(ghost[1]), r: 8, class: "ghost" }));
    part("still").innerHTML = shapes.join("");
  }

  function drawBars(kind, weights, others) {
    const [left, top, bottom] = [33, 8, 112];
    const place = (weight) => {
      const cut = Math.min(LARGEST_BAR, Math.max(SMALLEST_BAR, weight));
      return bottom - ((bottom - top) * (cut - SMALLEST_BAR)) / (LARGEST_BAR - SMALLEST_BAR);
    };
    const shapes = [];
    for (const tick of [-0.5, 0, 0.5, 1]) {
      const y = place(tick);
      shapes.push(svg("line", { x1: left, x2: 220, y1: y, y2: y, class: tick === 0 ? "base" : "grid" }));
      shapes.push(svg("text", { x: left - 4, y: y + 4, "text-anchor": "end" }, String(tick).replace("-", "−")));
    }
    weights.forEach((weight, index) => {
      const start = left + 4 + index * 31;
      [[weight, "solid"], [others[index], "outline"]].forEach(([value, name], side) => {
        const x = start + side * 13;
        const [high, low] = [place(value), place(0)].sort((a, b) => a - b);
        const title = `<title>k${index + 1}: ${value.toFixed(3).replace("-", "−")}</title>`;
        shapes.push(svg("rect", { x, y: high, width: 11, height: low - high, class: `weight ${name}` }, title));
        if (value > LARGEST_BAR || value < SMALLEST_BAR) {
          const end = value > 0 ? top + 3 : bottom - 3;
          shapes.push(svg("line", { x1: x - 1, x2: x + 12, y1: end, y2: end, class: "cut" }));
        }
      });
      shapes.push(svg("text", { x: start + 12, y: 127, "text-anchor": "middle" }, `k${index + 1}`));
    });
    const panel = part(kind);
    panel.innerHTML = shapes.join("");
    const rounded = weights.map((weight) => weight.toFixed(2)).join(", ");
    panel.setAttribute("aria-label", `Weights of the six keys under ${kind}: ${rounded}`);
    panel.dataset.weights = JSON.stringify(weights);
  }

  function draw() {
    const ghost = state.query.map((value) => state.factor * value);
    drawStill(ghost);
    handle.setAttribute("transform", `translate(${across(state.query[0])} ${down(state.query[1])})`);
    const [x, y] = state.query.map((value) => value.toFixed(1));
    handle.setAttribute("aria-valuenow", x);
    handle.setAttribute("aria-valuetext", `x ${x}, y ${y}`);
    const areOne = Math.hypot(state.query[0] - ghost[0], state.query[1] - ghost[1]) < 1e-6;
    const verdicts = Object.keys(attentions).map((kind) => {
      const [weights, others] = [weigh(kind, state.query), weigh(kind, ghost)];
      drawBars(kind, weights, others);
      const difference = Math.max(...weights.map((weight, index) => Math.abs(weight - others[index])));
      const isSame = difference <= settings.same;
      const verdict = part(`${kind}-verdict`);
      verdict.textContent = areOne
        ? "there is only one query"
        : isSame
          ? "✗ the same weights: cannot tell the two apart"
          : `✓ told apart: weights differ by up to ${difference.toFixed(3)}`;
      verdict.className = `verdict ${areOne ? "" : isSame ? "wrong" : "right"}`;
      return `${kind}: ${verdict.textContent.replace(/^\W+/, "")}`;
    });
    clearTimeout(draw.announcement); // a screen reader hears where the query came to rest, not every step
    draw.announcement = setTimeout(() => (part("spoken").textContent = verdicts.join(". ")), 600);
  }

  function moveTo(point) {
    state.query = point.map((value) => Math.min(HIGH, Math.max(LOW, value)));
    draw();
  }
  function moveToPointer(event) {
    const point = new DOMPoint(event.clientX, event.clientY).matrixTransform(drawing.getScreenCTM().inverse());
    moveTo([point.x, SIZE - point.y].map((value) => LOW + (value / SIZE) * (HIGH - LOW)));
  }
  handle.addEventListener("pointerdown", (event) => handle.setPointerCapture(event.pointerId));
  handle.addEventListener("pointermove", (event) => {
    if (handle.hasPointerCapture(event.pointerId)) moveToPointer(event);
  });
  drawing.addEventListener("click", moveToPointer);
  handle.addEventListener("keydown", (event) => {
    const step = event.shiftKey ? LARGE_STEP : STEP;
    const [x, y] = state.query;
    const places = { ArrowLeft: [x - step, y], ArrowRight: [x + step, y], ArrowUp: [x, y + step],
                     ArrowDown: [x, y - step], Home: settings.query };
    if (!(event.key in places)) return;
    event.preventDefault(); // the page would scroll
    moveTo(places[event.key]);
  });
  slider.addEventListener("input", () => {
    state.factor = Number(slider.value);
    part("factor").textContent = String(state.factor);
    draw();
  });
  for (const choice of document.getElementsByName("plane-map")) {
    choice.addEventListener("change", () => {
      state.map = choice.value;
      draw();
    });
  }
  draw();
})();
