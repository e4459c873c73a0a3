// The plane in which a query can be dragged, and the weights that three attentions give to six keys.
"use strict";
(() => {
  const settings = JSON.parse(document.getElementById("plane-settings").textContent);
  const SIZE = 300, LOW = -1.5, HIGH = 3.5; // pixels of the drawing, ends of both axes
  const SCALE = Math.SQRT1_2; // d ** -0.5 with d = 2
  const STEP = 0.1, LARGE_STEP = 0.5;
  const LARGEST_BAR = 1, SMALLEST_BAR = -0.5; // weights beyond are cut off, with a mark
  const drawing = document.getElementById("plane-drawing");
  const handle = document.getElementById("plane-query");
  const slider = document.getElementById("plane-ghost");
  const spoken = document.getElementById("plane-spoken");
  const state = { query: [...settings.query], factor: Number(slider.value), map: "relu" };

  const svg = (name, attributes, text) => {
    const element = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    if (text !== undefined) element.textContent = text;
    return element;
  };
  const across = (x) => (SIZE * (x - LOW)) / (HIGH - LOW);
  const down = (y) => SIZE - across(y);
  const dot = (a, b) => a[0] * b[0] + a[1] * b[1];
  const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;
  const maps = { relu: (x) => x.map((value) => Math.max(value, 0)), identity: (x) => x };

  const attentions = {
    softmax(query) {
      const scores = settings.keys.map((key) => SCALE * dot(query, key));
      const largest = Math.max(...scores);
      const powers = scores.map((score) => Math.exp(score - largest));
      const sum = powers.reduce((total, power) => total + power, 0);
      return powers.map((power) => power / sum);
    },
    linear(query) {
      const scores = mapped(query);
      const average = mean(scores);
      if (Math.abs(average) <= settings.smallest) return scores.map(() => 1 / scores.length);
      return scores.map((score) => score / average / scores.length);
    },
    inline(query) {
      const scores = mapped(query);
      const average = mean(scores);
      return scores.map((score) => (score - average + 1) / scores.length);
    },
  };
  function mapped(query) {
    const phi = maps[state.map];
    return settings.keys.map((key) => SCALE * dot(phi(query), phi(key)));
  }

  function drawStill(ghost) {
    const still = document.getElementById("plane-still");
    still.replaceChildren();
    for (let value = Math.ceil(LOW); value <= HIGH; value++) {
      const axis = value === 0 ? "base" : "grid";
      still.append(svg("line", { x1: across(value), x2: across(value), y1: 0, y2: SIZE, class: axis }));
      still.append(svg("line", { x1: 0, x2: SIZE, y1: down(value), y2: down(value), class: axis }));
    }
    const far = 20 / Math.max(1e-6, Math.hypot(...state.query));
    const [x, y] = state.query.map((value) => far * value);
    still.append(svg("line", { x1: across(0), y1: down(0), x2: across(x), y2: down(y), class: "ray" }));
    settings.keys.forEach((key, index) => {
      still.append(svg("rect", { x: across(key[0]) - 5, y: down(key[1]) - 5, width: 10, height: 10, class: "key" }));
      still.append(svg("text", { x: across(key[0]) + 9, y: down(key[1]) + 4 }, `k${index + 1}`));
    });
    still.append(svg("circle", { cx: across(ghost[0]), cy: down(ghost[1]), r: 8, class: "ghost" }));
  }

  function drawBars(kind, weights, others) {
    const panel = document.getElementById(`plane-${kind}`);
    const [left, top, bottom] = [33, 8, 112];
    const place = (weight) => {
      const cut = Math.min(LARGEST_BAR, Math.max(SMALLEST_BAR, weight));
      return bottom - ((bottom - top) * (cut - SMALLEST_BAR)) / (LARGEST_BAR - SMALLEST_BAR);
    };
    panel.replaceChildren();
    for (const tick of [-0.5, 0, 0.5, 1]) {
      const y = place(tick);
      panel.append(svg("line", { x1: left, x2: 220, y1: y, y2: y, class: tick === 0 ? "base" : "grid" }));
      panel.append(svg("text", { x: left - 4, y: y + 4, "text-anchor": "end" }, String(tick).replace("-", "−")));
    }
    weights.forEach((weight, index) => {
      const start = left + 4 + index * 31;
      [[weight, "solid"], [others[index], "outline"]].forEach(([value, name], side) => {
        const y = place(value);
        const [high, low] = [Math.min(y, place(0)), Math.max(y, place(0))];
        const title = svg("title", {}, `k${index + 1}: ${value.toFixed(3)}`);
        const bar = svg("rect", { x: start + side * 13, y: high, width: 11, height: low - high, class: `weight ${name}` });
        bar.append(title);
        panel.append(bar);
        if (value > LARGEST_BAR || value < SMALLEST_BAR) {
          const end = value > 0 ? top + 3 : bottom - 3;
          panel.append(svg("line", { x1: start + side * 13 - 1, x2: start + side * 13 + 12, y1: end, y2: end, class: "cut" }));
        }
      });
      panel.append(svg("text", { x: start + 12, y: 127, "text-anchor": "middle" }, `k${index + 1}`));
    });
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
    const verdicts = Object.entries(attentions).map(([kind, attention]) => {
      const [weights, others] = [attention(state.query), attention(ghost)];
      drawBars(kind, weights, others);
      const difference = Math.max(...weights.map((weight, index) => Math.abs(weight - others[index])));
      const isSame = difference <= settings.same;
      const verdict = document.getElementById(`plane-${kind}-verdict`);
      verdict.textContent = areOne
        ? "there is only one query"
        : isSame
          ? "✗ the same weights: cannot tell the two apart"
          : `✓ told apart: weights differ by up to ${difference.toFixed(3)}`;
      verdict.className = `verdict ${areOne ? "" : isSame ? "wrong" : "right"}`;
      return `${kind}: ${verdict.textContent.replace(/^\W+/, "")}`;
    });
    clearTimeout(draw.announcement); // a screen reader hears where the query came to rest, not every step
    draw.announcement = setTimeout(() => (spoken.textContent = verdicts.join(". ")), 600);
  }

  function moveTo(x, y) {
    state.query = [x, y].map((value) => Math.min(HIGH, Math.max(LOW, value)));
    draw();
  }
  function moveToPointer(event) {
    const point = new DOMPoint(event.clientX, event.clientY).matrixTransform(drawing.getScreenCTM().inverse());
    moveTo(LOW + (point.x / SIZE) * (HIGH - LOW), LOW + ((SIZE - point.y) / SIZE) * (HIGH - LOW));
  }
  handle.addEventListener("pointerdown", (event) => handle.setPointerCapture(event.pointerId));
  handle.addEventListener("pointermove", (event) => {
    if (handle.hasPointerCapture(event.pointerId)) moveToPointer(event);
  });
  drawing.addEventListener("click", moveToPointer);
  handle.addEventListener("keydown", (event) => {
    const step = event.shiftKey ? LARGE_STEP : STEP;
    const moves = { ArrowLeft: [-step, 0], ArrowRight: [step, 0], ArrowUp: [0, step], ArrowDown: [0, -step] };
    const move = moves[event.key];
    if (move === undefined && event.key !== "Home") return;
    event.preventDefault(); // the page would scroll
    if (move === undefined) moveTo(...settings.query);
    else moveTo(state.query[0] + move[0], state.query[1] + move[1]);
  });
  slider.addEventListener("input", () => {
    state.factor = Number(slider.value);
    document.getElementById("plane-factor").textContent = String(state.factor);
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
